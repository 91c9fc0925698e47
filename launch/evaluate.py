"""Evaluate a checkpoint:   python launch/evaluate.py checkpoint=RUN [tasks=cloze,...] [valid=false] [baseline=false]

checkpoint: a run folder (its newest checkpoint) or a checkpoint folder
tasks:      lm-eval tasks by name: cloze (from the held-out documents), or any of lm-eval's own; tasks=none for none
suite:      stickbreaking_paper: the tasks of the paper's Tables 2 to 4 (or those of them that tasks= names), printed beside it
eval_data:  the folder of local copies of tasks' data (data/eval)
limit:      of the first examples of each task (all)
length:     tokens of a text that the model is given at most (the training length)
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
    from eval.suite import TaskResult
    from eval.text import TextTokenizer
    from eval.validation import Loss
    from ssscale.data.stream import PackedData
    from ssscale.model.decoder import Decoder
    from ssscale.schema import Config

SUITE_NAME = "stickbreaking_paper"
CHANGEABLE = ("model.attention.", "model.position.")
OPTIONS = {
    "checkpoint": str,
    "tasks": str,
    "suite": str,
    "eval_data": str,
    "limit": int,
    "length": int,
    "tensor": int,
    "valid": str,
    "baseline": str,
    "data": str,
}
TIMEOUT_MINUTES = 24 * 60.0  # a rank may wait that long for the others' share of a task


@dataclass(frozen=True)
class Settings:
    """What was asked for; the options of the command."""

    names: list[str]
    suite: bool = False
    eval_data: str = "data/eval"
    limit: int | None = None
    length: int | None = None
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


def main(argv: list[str]) -> None:
    options, rest = take_options(argv, OPTIONS)
    unknown = [text for text in rest if not text.startswith(CHANGEABLE)]
    if unknown:
        known = ", ".join([*(f"{key}=" for key in OPTIONS), *(f"{key}*=" for key in CHANGEABLE)])
        raise UserError(f"unknown argument {unknown[0]!r}: this command takes {known}")
    if not options.get("checkpoint"):
        raise UserError("checkpoint=RUN is missing: name a run folder or a checkpoint folder")
    suite = options.get("suite")
    if suite not in (None, SUITE_NAME):
        raise UserError(f"suite={suite}: there is {SUITE_NAME} only")
    for key in ("limit", "length", "tensor"):
        if options.get(key, 1) < 1:
            raise UserError(f"{key} must be at least 1, not {options[key]}")
    valid, baseline = flag(options, "valid"), flag(options, "baseline")
    os.environ |= rank_environment(os.environ)
    prepare()

    from eval.paper import SUITE
    from ssscale.train.build import find_checkpoint

    tasks = options.get("tasks", ",".join(SUITE) if suite else "cloze")
    settings = Settings(
        names=[name for name in tasks.split(",") if name and name != "none"],
        suite=suite is not None,
        valid=valid is not False if suite is None else valid is True,
        baseline=baseline,
        changes=tuple(rest),
        **{key: options[key] for key in ("eval_data", "limit", "length", "tensor", "data") if key in options},
    )
    checkpoint = find_checkpoint(Path(options["checkpoint"]))
    main_rank = os.environ.get("RANK", "0") == "0"
    logging.basicConfig(level=logging.WARNING if main_rank else logging.ERROR, format="%(message)s")
    evaluate(checkpoint, settings, Console(quiet=not main_rank))


def evaluate(checkpoint: Path, settings: Settings, console: Console) -> None:
    """Everything that was asked for, printed and added to the results file of the checkpoint."""
    from eval.results import add_results, read_results, results_file
    from eval.text import TextTokenizer
    from ssscale.parallel.groups import initialize
    from ssscale.train.build import load_for_inference

    changes = list(settings.changes)
    file = results_file(checkpoint, changes)
    read_results(file)  # a broken file is better said before the work than after it
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
    tasks: list[TaskResult] = []
    if settings.names:
        tasks = evaluate_tasks(model, config, tokenizer, held_out, settings, file.parent, console)
        results["tasks"] = {task.task: task.to_json() for task in tasks}
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
    if settings.suite:
        from eval.paper import paper_tables

        wide = Console(width=max(console.width, 112))  # a narrower one would cut Table 2
        for table in paper_tables({task.task: task.metrics for task in tasks}, config.name):
            wide.print(table)
    console.print(f"results: {file}", highlight=False, soft_wrap=True)


def open_data(config: "Config", split: str, path: str | None) -> "PackedData":
    """A split of the run's data folder, checked against the run. Raises UserError."""
    from ssscale.data.stream import PackedData

    data = config.data
    hint = "name the folder that the run was trained on with data=FOLDER"
    return PackedData.open(
        path or data.path,
        split,
        cache=None if path else data.cache,
        cache_gb=data.cache_gb,
        vocab_size=config.model.vocab_size,
        length=data.length,
        hint=hint,
    )


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
