"""RULER's 13 tasks (arXiv:2404.06654) at several lengths, a task and a length at a time."""

import time
from collections.abc import Iterable, Iterator
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
    """The share of the answers that the text holds."""
    return {"string_match": string_match_all(postprocess_pred(results), [doc["outputs"]])}


def score_question(doc: Doc, results: list[str]) -> dict[str, float]:
    """Whether the text holds one of the answers, which mean the same. lm-eval's score is the share of them that it holds."""
    share = string_match_part(postprocess_pred(results), [doc["outputs"]])
    return {"string_match": float(share > 0), LM_EVALS: share}


def definition(task: str, length: int, docs: list[Doc]) -> dict[str, Any]:
    """lm-eval's definition of a task, over these samples and with one name for a score at any length."""
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
    """What was asked for. samples: of each task at each length."""

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
    """Everything that can be wrong is found here: before hours of work. Raises UserError."""
    tasks = [task for task in TASKS if task in tasks]
    found = find_sources(needed(tasks), eval_data, stand_ins)
    texts = Texts({name: file for name, (file, _) in found.items()})
    check(tasks, lengths, tokenizer.encode, texts)
    sources = {name: source for name, (_, source) in found.items()}
    return Ruler(tasks, lengths, SAMPLES if limit is None else limit, sources, texts)


def run_ruler(
    ruler: Ruler, model: Decoder, tokenizer: TextTokenizer, name: str, console: Console
) -> Iterator[TaskResult]:
    """The result of each task at each length, `TASK@LENGTH`, on the ranks that lm-eval gives any to; all take part.

    Every rank makes all samples, the same ones. Among the metrics are the tokens that samples take, on average and at
    most, and the file that they are made from.
    """
    show = model.groups.is_main
    limit = None if ruler.samples == SAMPLES else ruler.samples
    for length in ruler.lengths:
        lm = PackedLM(model, tokenizer, length, name=name, show=show)
        for task in ruler.tasks:
            began = time.perf_counter()

            def shown(steps: Iterable[int], what: str = f"{task}@{length}") -> Iterable[int]:
                return track(steps, f"{what}, making samples", ruler.samples, show, unit="samples")

            counter = counter_of(task, tokenizer.encode)
            docs = generate(task, length, ruler.samples, counter, ruler.texts, shown)
            made = time.perf_counter() - began
            manager = TaskManager(include_defaults=False)
            for result in run_lm_eval(lm, [definition(task, length, docs)], manager):
                sizes = [doc["length"] for doc in docs]
                metrics = result.metrics | {"mean_length": fmean(sizes), "longest": max(sizes)}
                for source in needed([task]):
                    metrics["data"] = ruler.sources[source].to_json()
                fewer = f" of {ruler.samples}, as the others do not fit" if len(docs) < ruler.samples else ""
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
) -> list[TaskResult]:
    """`run_ruler`, each result added to the results file, with `results`, when it is there: the whole may take hours."""
    cells: list[TaskResult] = []
    about = ruler.to_json()
    for cell in run_ruler(ruler, model, tokenizer, name, console):
        cells.append(cell)
        if model.groups.is_main:
            content = {"ruler": about | {"average": averages(cells)}, "tasks": {cell.task: cell.to_json()}}
            add_results(file, results | content)
    return cells


def averages(results: list[TaskResult]) -> dict[int, float]:
    """The mean over the tasks at each length."""
    by_length: dict[int, list[float]] = {}
    for result in results:
        by_length.setdefault(int(result.task.rpartition("@")[2]), []).append(result.value)
    return {length: fmean(values) for length, values in by_length.items()}


def ruler_table(ruler: Ruler, results: list[TaskResult]) -> Table:
    """Scores in per cent, tasks by lengths."""
    values = {result.task: result.value for result in results}
    table = Table(title="RULER (arXiv:2404.06654), per cent", box=ASCII, title_justify="left")
    table.add_column("task", no_wrap=True)
    for length in ruler.lengths:
        table.add_column(f"{length:,}", justify="right", no_wrap=True)
    for task in ruler.tasks:
        table.add_row(task, *(f"{100 * values[f'{task}@{length}']:.1f}" for length in ruler.lengths))
    table.add_section()
    table.add_row(f"average of {len(ruler.tasks)}", *(f"{100 * value:.1f}" for value in averages(results).values()))
    return table
