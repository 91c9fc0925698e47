"""Evaluate a checkpoint:   python launch/evaluate.py checkpoint=RUN [tasks=cloze,...] [valid=false] [baseline=false]

checkpoint: a run folder (its newest checkpoint) or a checkpoint folder
tasks:      lm-eval tasks by name: cloze (from the held-out documents), or any of lm-eval's own; tasks=none for none
suite:      stickbreaking_paper: the tasks of the paper's Tables 2 to 4 (or those of them that tasks= names), printed beside it;
            ruler: RULER's 13 tasks (or those of them that tasks= names)
eval_data:  the folder of local copies of tasks' data (data/eval)
limit:      of the first examples of each task (all; of RULER's tasks 500 at each length)
length:     tokens of a text that the model is given at most (the training length; for RULER's tasks each of `lengths`)
lengths:    of RULER's samples, such as 4096,8192,16384 (length, or the training length)
stand_in:   texts for RULER's samples in place of what they are made from: essays:FILE,squad:FILE,hotpotqa:FILE
part:       I/N: every N-th task from the I-th on, counted from 0, as a job of several takes them (RULER's are one; the first
            part has the validation loss)
tensor:     tensor-parallel processes (1); under torchrun or srun the others share the work out
valid:      loss over the whole validation split (true)
baseline:   the Kneser–Ney bigram of the same training tokens beside it (true up to 50 million training tokens)
data:       the data folder, where it is no longer the one that the run was trained on from here
model.*:    keys to change for this evaluation, such as model.position.rope_base=500000, model.position.window=512 or
            model.attention.core=ssmax on a softmax run; the checkpoint stays as it is

Prints a table and adds it to RUN/eval/step-XXXXXXXX.json (with changes: RUN/eval/CHANGES/...). Needs no GPU.
`torchrun --nproc_per_node=8 launch/evaluate.py ...` writes the same file as one process.
"""

import logging
import os
import re
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if not __package__:  # started as a script: imports start at the repository's root, not in launch/
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from rich.box import ASCII
from rich.console import Console
from rich.table import Table

from eval.environment import prepare
from launch.cli import run, take_options
from launch.process import rank_environment
from ssscale.errors import UserError

if TYPE_CHECKING:
    from eval.ruler.run import Ruler
    from eval.suite import TaskResult
    from eval.text import TextTokenizer
    from eval.validation import Loss
    from ssscale.data.stream import PackedData
    from ssscale.model.decoder import Decoder
    from ssscale.schema import Config

SUITES = ("stickbreaking_paper", "ruler")
CHANGEABLE = ("model.attention.", "model.position.")
OPTIONS = {
    "checkpoint": str,
    "tasks": str,
    "suite": str,
    "eval_data": str,
    "limit": int,
    "length": int,
    "lengths": str,
    "stand_in": str,
    "part": str,
    "tensor": int,
    "valid": str,
    "baseline": str,
    "data": str,
}
KEPT = ("eval_data", "limit", "length", "lengths", "stand_in", "tensor", "data")  # in Settings as they are given
TIMEOUT_MINUTES = 24 * 60.0  # a rank may wait that long for the others' share of a task


@dataclass(frozen=True)
class Settings:
    """What was asked for; the options of the command."""

    names: list[str]
    ruler: list[str]
    suite: str | None = None
    eval_data: str = "data/eval"
    limit: int | None = None
    length: int | None = None
    lengths: str | None = None
    stand_in: str | None = None
    tensor: int = 1
    valid: bool = True
    baseline: bool | None = None
    data: str | None = None
    changes: tuple[str, ...] = ()


def flag(options: dict[str, Any], key: str) -> bool | None:
    """true or false, None where it is not given."""
    text = options.get(key)
    if text not in (None, "true", "false"):
        raise UserError(f"{key} must be true or false, not {text!r}")
    return None if text is None else text == "true"


def parse_part(text: str) -> tuple[int, int]:
    """(I, N) of `I/N`. Raises UserError."""
    found = re.fullmatch(r"(\d+)/(\d+)", text)
    index, count = (int(number) for number in found.groups()) if found else (0, 0)
    if not index < count:
        raise UserError(f"part must be I/N with I from 0 to N − 1, not {text!r}")
    return index, count


def main(argv: list[str]) -> None:
    options, rest = take_options(argv, OPTIONS)
    unknown = [text for text in rest if not text.startswith(CHANGEABLE)]
    if unknown:
        known = ", ".join([*(f"{key}=" for key in OPTIONS), *(f"{key}*=" for key in CHANGEABLE)])
        raise UserError(f"unknown argument {unknown[0]!r}: this command takes {known}")
    if not options.get("checkpoint"):
        raise UserError("checkpoint=RUN is missing: name a run folder or a checkpoint folder")
    suite = options.get("suite")
    if suite not in (None, *SUITES):
        raise UserError(f"suite={suite}: there are {' and '.join(SUITES)}")
    for key in ("limit", "length", "tensor"):
        if options.get(key, 1) < 1:
            raise UserError(f"{key} must be at least 1, not {options[key]}")
    valid, baseline = flag(options, "valid"), flag(options, "baseline")
    os.environ |= rank_environment(os.environ)
    prepare()

    from eval.paper import SUITE
    from eval.ruler import TASKS

    whole = {"stickbreaking_paper": ",".join(SUITE), "ruler": "ruler", None: "cloze"}
    tasks = options.get("tasks", whole[suite])
    names = [name for name in tasks.split(",") if name and name != "none"]
    ruler = list(TASKS) if "ruler" in names else [name for name in names if name in TASKS]
    names = [name for name in names if name not in (*ruler, "ruler")]
    index, count = parse_part(options.get("part", "0/1"))
    if not ruler and (options.get("lengths") or options.get("stand_in")):
        raise UserError("lengths and stand_in are for RULER's tasks: name some in tasks=, or all with suite=ruler")
    settings = Settings(
        names=names[index::count],
        ruler=ruler if len(names) % count == index else [],
        suite=suite,
        valid=index == 0 and (valid is not False if suite is None else valid is True),
        baseline=baseline,
        changes=tuple(rest),
        **{key: options[key] for key in KEPT if key in options},
    )
    main_rank = os.environ.get("RANK", "0") == "0"
    logging.basicConfig(level=logging.WARNING if main_rank else logging.ERROR, format="%(message)s")
    evaluate(Path(options["checkpoint"]), settings, Console(quiet=not main_rank))


def evaluate(path: Path, settings: Settings, console: Console) -> None:
    """Everything that was asked for, printed and added to the results file of the checkpoint. path: it, or its run."""
    from eval.results import add_results, check_writable, read_results, results_file
    from eval.text import TextTokenizer
    from ssscale.parallel.groups import initialize
    from ssscale.train.build import load_model
    from ssscale.train.reading import reading

    changes = list(settings.changes)
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    groups = initialize(settings.tensor, local_rank, TIMEOUT_MINUTES, distributed="RANK" in os.environ)
    with reading(path, groups) as checkpoint:
        file = results_file(checkpoint, changes)
        read_results(file)  # a broken file is better said before the work than after it
        if groups.is_main:
            check_writable(file)
        model, config = load_model(checkpoint, groups, changes=changes)
        needed = settings.valid or "cloze" in settings.names
        held_out = open_data(config, "valid", settings.data) if needed else None
        tokenizer = TextTokenizer.of_checkpoint(checkpoint, held_out)
    results: dict[str, Any] = {
        "checkpoint": str(checkpoint),
        "parameters": model.num_parameters(),
        "prefix": "BOS before every document",
    }
    if changes:
        results["changes"] = changes
    ruler = plan_ruler(config, tokenizer, settings, console) if settings.ruler else None
    tasks: list[TaskResult] = []
    if settings.names:
        tasks = evaluate_tasks(model, config, tokenizer, held_out, settings, file.parent, console)
        results["tasks"] = {task.task: task.to_json() for task in tasks}
    if ruler is not None:
        from eval.ruler.run import averages, ruler_table, run_ruler

        results["ruler"] = ruler.to_json()
        cells: list[TaskResult] = []
        for cell in run_ruler(ruler, model, tokenizer, config.name, console):
            cells.append(cell)
            results["tasks"] = results.get("tasks", {}) | {cell.task: cell.to_json()}
            if groups.is_main:  # what is done is kept: the whole may take hours
                add_results(file, results)
        results["ruler"]["average"] = averages(cells)
    losses: dict[str, Loss] = {}
    if settings.valid:
        assert held_out is not None
        losses = evaluate_losses(model, config, held_out, settings, console)
        results |= {name: loss.to_json() for name, loss in losses.items()}
        results["data_fingerprint"] = held_out.fingerprint
    if not groups.is_main:
        return
    add_results(file, results)
    show(console, checkpoint, tasks, losses)
    if ruler is not None:
        console.print(ruler_table(ruler, cells))
    if settings.suite == "stickbreaking_paper":
        from eval.paper import paper_tables

        wide = Console(width=max(console.width, 112))  # a narrower one would cut Table 2
        found = read_results(file)["tasks"]  # those of other parts too
        for table in paper_tables({name: task["metrics"] for name, task in found.items()}, config.name):
            wide.print(table)
    console.print(f"results: {file}", highlight=False, soft_wrap=True)


def plan_ruler(config: "Config", tokenizer: "TextTokenizer", settings: Settings, console: Console) -> "Ruler":
    """RULER's tasks and lengths; says what the samples are made from, and where they are longer than those of training."""
    from eval.command import whole_numbers

    try:
        from eval.ruler.data import parse_stand_ins
        from eval.ruler.run import prepare_ruler
    except ModuleNotFoundError as error:
        raise UserError(f"RULER's tasks need {error.name}: pip install 'lm-eval[ruler]', or make setup") from None

    most = settings.length or config.data.length
    lengths = sorted(set(whole_numbers(settings.lengths or str(most), "lengths")))
    if settings.length and lengths[-1] > most:
        raise UserError(f"lengths={lengths[-1]}: the model is given {most:,} tokens at most (length={most})")
    stand_ins = parse_stand_ins(settings.stand_in)
    ruler = prepare_ruler(settings.ruler, lengths, settings.limit, settings.eval_data, stand_ins, tokenizer)
    for name, source in ruler.sources.items():
        console.print(source.sentence(name), highlight=False, soft_wrap=True)
    longer = ", ".join(f"{length:,}" for length in lengths if length > config.data.length)
    if longer:
        console.print(f"lengths beyond the {config.data.length:,} tokens of training: {longer}", highlight=False)
    return ruler


def open_data(config: "Config", split: str, path: str | None) -> "PackedData":
    """A split of the run's data folder, checked against the run. Raises UserError."""
    from ssscale.train import build

    return build.open_data(config, split, path, hint="name the folder that the run was trained on with data=FOLDER")


def evaluate_tasks(
    model: "Decoder",
    config: "Config",
    tokenizer: "TextTokenizer",
    held_out: "PackedData | None",
    settings: Settings,
    folder: Path,
    console: Console,
) -> "list[TaskResult]":
    """lm-eval's tasks on the model. The items of the cloze task are written to `folder`."""
    import torch.distributed as dist

    from eval.cloze import build_items, write_items
    from eval.harness import PackedLM
    from eval.suite import find_tasks, run_tasks
    from eval.text import held_out as held_out_texts

    names = settings.names
    length = settings.length or config.data.length
    items = folder / "cloze.jsonl"
    manager = find_tasks(names, {"cloze_items": str(items), "eval_data": settings.eval_data})
    if "cloze" in names:
        assert held_out is not None
        if model.groups.is_main:
            write_items(build_items(held_out_texts(held_out, tokenizer), tokenizer, config.data.length), items)
        dist.barrier()
    lm = PackedLM(model, tokenizer, length, name=config.name, show=console.is_terminal and model.groups.is_main)
    began = time.perf_counter()
    results = run_tasks(lm, names, manager, settings.limit)
    seconds = time.perf_counter() - began
    console.print(f"{', '.join(names)}: {seconds:.0f} s", highlight=False)
    return results


def evaluate_losses(
    model: "Decoder",
    config: "Config",
    held_out: "PackedData",
    settings: Settings,
    console: Console,
) -> "dict[str, Loss]":
    """`valid`: the model's loss over the whole validation split; `baseline`: the bigram's on the same targets."""
    from eval.validation import bigram_fits, bigram_loss, model_loss

    one_document = config.data.one_document
    microbatch, baseline = config.train.microbatch, settings.baseline
    losses = {"valid": model_loss(model, held_out, microbatch, one_document, show=console.is_terminal)}
    if baseline is not False and model.groups.is_main:
        train = open_data(config, "train", settings.data)
        if baseline or bigram_fits(train):
            losses["baseline"] = bigram_loss(train, held_out, one_document)
        else:
            console.print("no Kneser–Ney bigram: more than 50 million training tokens (baseline=true makes one)")
    return losses


def show(console: Console, checkpoint: Path, tasks: "list[TaskResult]", losses: "dict[str, Loss]") -> None:
    """The results as two tables."""
    table = Table(title=f"{checkpoint}", box=ASCII, title_justify="left")
    for column in ("task", "metric", "value", "chance", "items"):
        table.add_column(column, justify="left" if column in ("task", "metric") else "right", no_wrap=True)
    for task in tasks:
        error = "" if task.stderr is None else f" ± {task.stderr:.4f}"
        chance = "" if task.chance is None else f"{task.chance:.4f}"
        table.add_row(task.task, task.metric, f"{task.value:.4f}{error}", chance, f"{task.items:,}")
    if tasks:
        console.print(table)
    table = Table(box=ASCII)
    for column in ("loss on the whole validation split", "nats a token", "bits a byte", "targets"):
        table.add_column(column, justify="left" if column.startswith("loss") else "right", no_wrap=True)
    for name, label in (("valid", "this model"), ("baseline", "Kneser–Ney bigram, d = 0.75")):
        if name in losses:
            loss = losses[name]
            table.add_row(label, f"{loss.nats_per_token:.4f}", f"{loss.bits_per_byte:.4f}", f"{loss.targets:,}")
    if losses:
        console.print(table)


if __name__ == "__main__":
    run(main, __doc__)
