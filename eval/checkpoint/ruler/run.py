"""Runs RULER's 13 tasks (arXiv:2404.06654) at several lengths, one task at one length at a time."""

import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import lm_eval
from datasets import Dataset, DatasetDict
from lm_eval.tasks import TaskManager
from lm_eval.tasks._yaml_loader import load_yaml
from lm_eval.tasks.ruler.common_utils import postprocess_pred, string_match_all, string_match_part
from rich.box import ASCII
from rich.console import Console
from rich.table import Table

from eval.checkpoint.harness import PackedLM
from eval.checkpoint.progress import track
from eval.checkpoint.results import add_results
from eval.checkpoint.ruler import TASKS
from eval.checkpoint.ruler.data import Source, find_sources
from eval.checkpoint.ruler.samples import QUESTIONS, SAMPLES, Doc, Texts, check, counter_of, generate, needed
from eval.checkpoint.scoring import TaskResult
from eval.checkpoint.suite import run_lm_eval
from eval.checkpoint.text import TextTokenizer
from ssscale.model.decoder import Decoder

THEIRS = Path(lm_eval.__file__).parent / "tasks" / "ruler"
LM_EVALS = "lm_eval_string_match"


def score_answers(doc: Doc, results: list[str]) -> dict[str, float]:
    """Return the share of the answers that the text contains."""
    return {"string_match": string_match_all(postprocess_pred(results), [doc["outputs"]])}


def score_question(doc: Doc, results: list[str]) -> dict[str, float]:
    """Return 1.0 if the text contains one of the answers, which are alternatives, and lm-eval's score.

    lm-eval's score is the share of the alternatives that the text contains.
    """
    share = string_match_part(postprocess_pred(results), [doc["outputs"]])
    return {"string_match": float(share > 0), LM_EVALS: share}


def definition(task: str, length: int, docs: list[Doc]) -> dict[str, Any]:
    """Return lm-eval's definition of a task with the given samples. The score has the same name at every length."""
    config = load_yaml(THEIRS / f"{task.removeprefix('ruler_')}.yaml", resolve_func=False)
    metrics = ["string_match", *([LM_EVALS] if task in QUESTIONS else [])]
    return config | {
        "task": f"{task}@{length}",
        "custom_dataset": lambda **_: DatasetDict({"test": Dataset.from_list(docs)}),
        "process_results": score_question if task in QUESTIONS else score_answers,
        "metric_list": [{"metric": name, "aggregation": "mean", "higher_is_better": True} for name in metrics],
    }


@dataclass(frozen=True)
class Ruler:
    """A request for RULER.

    tasks, lengths: every task runs at every length, in tokens.
    samples: number of samples per task and length.
    sources: the source files, by the names of `data.ORIGINS`.
    texts: the content of these files.
    """

    tasks: list[str]
    lengths: list[int]
    samples: int
    sources: dict[str, Source]
    texts: Texts

    def to_json(self) -> dict[str, Any]:
        data = {name: source.to_json() for name, source in self.sources.items()}
        return {"tasks": self.tasks, "lengths": self.lengths, "samples": self.samples, "data": data}


def prepare_ruler(
    tasks: list[str],
    lengths: list[int],
    limit: int | None,
    eval_data: str,
    stand_ins: dict[str, Path],
    tokenizer: TextTokenizer,
) -> Ruler:
    """Find the texts and check all lengths before hours of work begin.

    limit: number of samples per task and length. None: SAMPLES.

    Raises UserError for missing texts and lengths that are too short for a task.
    """
    tasks = [task for task in TASKS if task in tasks]
    found = find_sources(needed(tasks), eval_data, stand_ins)
    texts = Texts({name: file for name, (file, _) in found.items()})
    check(tasks, lengths, tokenizer.encode, texts)
    sources = {name: source for name, (_, source) in found.items()}
    return Ruler(tasks, lengths, SAMPLES if limit is None else limit, sources, texts)


def run_ruler(
    ruler: Ruler,
    model: Decoder,
    tokenizer: TextTokenizer,
    name: str,
    console: Console,
    done: Mapping[str, dict[str, Any]],
) -> Iterator[TaskResult]:
    """Yield the result `TASK@LENGTH` of each task at each length, on the ranks to which lm-eval gives results.

    All ranks must call it. Every rank makes the same samples. The metrics include the mean and the maximum tokens per
    sample, and the source file of the samples. done: results that are not computed again, if their samples were made from
    the same files.
    """
    show = model.groups.is_main
    limit = None if ruler.samples == SAMPLES else ruler.samples
    for length in ruler.lengths:
        lm = PackedLM(model, tokenizer, length, name=name, show=show)
        for task in ruler.tasks:
            sources = [{"data": ruler.sources[source].to_json()} for source in needed([task])]  # one, or none
            data = sources[0] if sources else {}
            before = done.get(f"{task}@{length}")
            if before is not None and before["metrics"].get("data") == data.get("data"):
                yield TaskResult.from_json(before)
                continue
            began = time.perf_counter()

            def shown(steps: Iterable[int], what: str = f"{task}@{length}") -> Iterable[int]:
                return track(steps, f"{what}, making samples", ruler.samples, show, unit="samples")

            counter = counter_of(task, tokenizer.encode)
            docs = generate(task, length, ruler.samples, counter, ruler.texts, shown)
            made = time.perf_counter() - began
            manager = TaskManager(include_defaults=False)
            for result in run_lm_eval(lm, [definition(task, length, docs)], manager):
                sizes = [doc["length"] for doc in docs]
                metrics = result.metrics | {"mean_length": fmean(sizes), "longest": max(sizes)} | data
                fewer = f" of {ruler.samples}, because the others do not fit" if len(docs) < ruler.samples else ""
                console.print(
                    f"{result.task}: {100 * result.value:.1f} ({len(docs)} samples{fewer}; "
                    f"{made:.0f} s to make, {time.perf_counter() - began - made:.0f} s to answer)",
                    highlight=False,
                )
                yield replace(result, metrics=metrics, limit=limit)


def evaluate_ruler(
    ruler: Ruler,
    model: Decoder,
    tokenizer: TextTokenizer,
    name: str,
    file: Path,
    results: dict[str, Any],
    console: Console,
    done: Mapping[str, dict[str, Any]],
) -> list[TaskResult]:
    """Run RULER and add each result to the results file as soon as it is known, because the whole may take hours.

    results: further content for the file. done: results by name that are not computed again.
    """
    cells: list[TaskResult] = []
    about = ruler.to_json()
    for cell in run_ruler(ruler, model, tokenizer, name, console, done):
        cells.append(cell)
        if model.groups.is_main:
            content = {"ruler": about | {"average": averages(cells)}, "tasks": {cell.task: cell.to_json()}}
            add_results(file, results | content)
    return cells


def averages(results: list[TaskResult]) -> dict[int, float]:
    """Return the mean over the tasks for each length."""
    by_length: dict[int, list[float]] = {}
    for result in results:
        by_length.setdefault(int(result.task.rpartition("@")[2]), []).append(result.value)
    return {length: fmean(values) for length, values in by_length.items()}


def ruler_table(ruler: Ruler, results: list[TaskResult]) -> Table:
    """Return a table of scores in percent, one row per task and one column per length."""
    values = {result.task: result.value for result in results}
    table = Table(title="RULER (arXiv:2404.06654), percent", box=ASCII, title_justify="left")
    table.add_column("task", no_wrap=True)
    for length in ruler.lengths:
        table.add_column(f"{length:,}", justify="right", no_wrap=True)
    for task in ruler.tasks:
        table.add_row(task, *(f"{100 * values[f'{task}@{length}']:.1f}" for length in ruler.lengths))
    table.add_section()
    table.add_row(f"average of {len(ruler.tasks)}", *(f"{100 * value:.1f}" for value in averages(results).values()))
    return table
