"""Evaluate a checkpoint: lm-eval's tasks, and the loss over the whole validation split beside a bigram's.

Prints a table and adds it to RUN/eval/step-XXXXXXXX.json (with changes of keys: RUN/eval/CHANGES/...). Needs no GPU. Several
processes (gpus=, torchrun or srun) write the same file as one.
"""

import logging
import os
import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.box import ASCII
from rich.console import Console
from rich.table import Table

from launch import boot, workers
from launch.boot import Command, Option
from ssscale.errors import UserError
from ssscale.train.checkpoint_folder import find_checkpoint, saved_config

if TYPE_CHECKING:
    from eval.ruler.run import Ruler
    from eval.suite import TaskResult
    from eval.text import TextTokenizer
    from eval.validation import Loss
    from ssscale.data.stream import PackedData
    from ssscale.model.decoder import Decoder
    from ssscale.schema import Config

SUITES = ("stickbreaking_paper", "ruler")
DATA_HINT = "name the folder that the run was trained on with data=FOLDER"
CHANGEABLE = ("model.attention.", "model.position.")
COMMAND = Command(
    about=__doc__,
    usage="python launch/evaluate.py checkpoint=RUN [tasks=NAME,...] [suite=NAME] [gpus=N] [key=value ...]",
    example="python launch/evaluate.py checkpoint=runs/3b_sb tasks=cloze,hellaswag eval_data=data/eval",
    options=(
        Option(
            "checkpoint",
            str,
            "a run folder (its newest checkpoint) or a checkpoint folder",
            metavar="RUN",
            required=True,
        ),
        Option(
            "tasks",
            str,
            "lm-eval tasks by name: cloze (from the held-out documents; the default), or any of lm-eval's own; none for none",
            metavar="NAME,...",
        ),
        Option(
            "suite",
            str,
            "stickbreaking_paper: the tasks of the paper's Tables 2 to 4 (or those of them that tasks= names), printed "
            "beside it; ruler: RULER's 13 tasks (or those of them that tasks= names)",
            choices=SUITES,
        ),
        Option("eval_data", str, "the folder of local copies of tasks' data", default="data/eval", metavar="FOLDER"),
        Option(
            "limit", int, "of the first examples of each task (all; of RULER's tasks 500 at each length)", at_least=1
        ),
        Option(
            "length",
            int,
            "tokens of a text that the model is given at most (the training length; for RULER's tasks each of lengths=)",
            at_least=1,
        ),
        Option("lengths", str, "of RULER's samples (length=, or the training length)", metavar="4096,8192"),
        Option(
            "stand_in",
            str,
            "texts for RULER's samples in place of what they are made from",
            metavar="essays:FILE,squad:FILE,hotpotqa:FILE",
        ),
        Option(
            "part",
            str,
            "every N-th task from the I-th on, counted from 0, as a job of several takes them (RULER's are one; the first "
            "part has the validation loss)",
            metavar="I/N",
            default="0/1",
        ),
        Option("tensor", int, "tensor-parallel processes; the others share the work out", default=1, at_least=1),
        Option("valid", bool, "loss over the whole validation split (true without suite=)"),
        Option(
            "baseline",
            bool,
            "the Kneser–Ney bigram of the same training tokens beside it (true up to 50 million training tokens)",
        ),
        Option("data", str, "the data folder, where it is not the one that the run was trained on", metavar="FOLDER"),
        *workers.OPTIONS,
    ),
    keys=CHANGEABLE,
)
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


def parse_part(text: str) -> tuple[int, int]:
    """(I, N) of `I/N`. Raises UserError."""
    found = re.fullmatch(r"(\d+)/(\d+)", text)
    index, count = (int(number) for number in found.groups()) if found else (0, 0)
    if not index < count:
        raise UserError(f"part must be I/N with I from 0 to N − 1, not {text!r}")
    return index, count


def main(argv: list[str]) -> None:
    options, changes = COMMAND.parse(argv)
    settings = settings_of(options, changes)
    several = workers.Workers.of(options)
    checkpoint = checked(options, settings)
    if several is not None:
        own = [text for text in argv if text.partition("=")[0] not in ("gpus", "processes")]
        boot.leave(several.run("launch/evaluate.py", own, saves=False))
    boot.join_ranks()
    from eval.environment import prepare

    prepare()
    boot.log(logging.WARNING, force=False)
    evaluate(checkpoint, settings, Console(quiet=boot.rank() != 0))


def settings_of(options: dict[str, Any], changes: list[str]) -> Settings:
    """What the options ask for. Raises UserError."""
    from eval.paper import SUITE
    from eval.ruler import TASKS

    suite = options.get("suite")
    whole = {"stickbreaking_paper": ",".join(SUITE), "ruler": "ruler", None: "cloze"}
    tasks = options.get("tasks", whole[suite])
    names = [name for name in tasks.split(",") if name and name != "none"]
    ruler = list(TASKS) if "ruler" in names else [name for name in names if name in TASKS]
    names = [name for name in names if name not in (*ruler, "ruler")]
    index, count = parse_part(options["part"])
    if not ruler and (options.get("lengths") or options.get("stand_in")):
        raise UserError("lengths and stand_in are for RULER's tasks: name some in tasks=, or all with suite=ruler")
    return Settings(
        names=names[index::count],
        ruler=ruler if len(names) % count == index else [],
        suite=suite,
        valid=index == 0 and options.get("valid", suite is None),
        baseline=options.get("baseline"),
        changes=tuple(changes),
        **{key: options[key] for key in KEPT if key in options},
    )


def checked(options: dict[str, Any], settings: Settings) -> Path:
    """The checkpoint. Raises UserError for what can be seen without torch and lm-eval, which take seconds to import."""
    from eval.results import read_results, results_file
    from eval.task_names import check_tasks
    from ssscale.config import change, validate
    from ssscale.train.early import check_data

    checkpoint = find_checkpoint(Path(options["checkpoint"]))
    config = change(saved_config(checkpoint), list(settings.changes))
    validate(config)
    check_tasks(settings.names, settings.eval_data)
    if settings.valid or "cloze" in settings.names:
        check_data(config, settings.data, "valid", hint=DATA_HINT)
    read_results(results_file(checkpoint, list(settings.changes)))  # a broken file is better said before the work
    return checkpoint


def evaluate(checkpoint: Path, settings: Settings, console: Console) -> None:
    """Everything that was asked for, printed and added to the results file of the checkpoint."""
    import torch

    from eval.results import add_results, read_results, results_file
    from eval.text import TextTokenizer
    from ssscale.parallel.groups import initialize
    from ssscale.train.build import load_for_inference

    workers.check_device(torch.cuda.is_available())
    changes = list(settings.changes)
    file = results_file(checkpoint, changes)
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    groups = initialize(settings.tensor, local_rank, TIMEOUT_MINUTES, distributed="RANK" in os.environ)
    model, config = load_for_inference(checkpoint, groups, changes=changes)
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

    return build.open_data(config, split, path, hint=DATA_HINT)


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
    boot.run(COMMAND, main)
