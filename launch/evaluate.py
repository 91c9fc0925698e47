"""Evaluate a checkpoint on lm-eval tasks, and its loss on the whole validation split next to a bigram's.

Prints a table and adds it to RUN/eval/step-XXXXXXXX.json. Results with limit, length, num_fewshot or changed keys go to
a folder named after these settings, such as RUN/eval/limit=100/. If a task cannot be scored, its name and document are
printed, the other tasks continue, and the exit code is 2. Needs no GPU. Several processes (gpus=, torchrun or srun)
share the work and write the same results as one.
"""

import logging
import os
import re
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from launch import boot, workers
from launch.boot import Command, Option
from ssscale.errors import UserError
from ssscale.train.checkpoint_folder import find_checkpoint, saved_config

if TYPE_CHECKING:
    from eval.checkpoint.ruler.run import Ruler
    from eval.checkpoint.scoring import TaskResult
    from eval.checkpoint.suite import Outcome
    from eval.checkpoint.text import TextTokenizer
    from eval.checkpoint.validation import Loss
    from ssscale.config.schema import Config
    from ssscale.data.stream import PackedData
    from ssscale.model.decoder import Decoder

SUITES = ("stickbreaking_paper", "ruler")
DATA_HINT = "name the folder that the run was trained on with data=FOLDER, or score any task but cloze with valid=false"
CHANGEABLE = ("model.mixers", "model.mixer.", "model.position.")
CHECKPOINT = Option(
    "checkpoint", str, "a run folder (its newest checkpoint) or a checkpoint folder", metavar="RUN", required=True
)
COMMAND = Command(
    about=__doc__,
    usage="python launch/evaluate.py checkpoint=RUN [tasks=NAME,...] [suite=NAME] [gpus=N] [key=value ...]",
    example="python launch/evaluate.py checkpoint=runs/3b_sb tasks=cloze,hellaswag eval_data=data/eval",
    options=(
        CHECKPOINT,
        Option(
            "tasks",
            str,
            "lm-eval tasks by name: cloze (from the held-out documents; the default), any of lm-eval's own or of include's, or "
            "the path of a YAML file; none for none",
            metavar="NAME,...",
        ),
        Option("include", str, "folders of your own lm-eval tasks as YAML", metavar="FOLDER,..."),
        Option(
            "suite",
            str,
            "stickbreaking_paper: the tasks of the paper's Tables 2 to 4 (or those of them that tasks= names), printed "
            "beside it; ruler: RULER's 13 tasks (or those of them that tasks= names)",
            choices=SUITES,
        ),
        Option("eval_data", str, "the folder of local copies of tasks' data", default="data/eval", metavar="FOLDER"),
        Option("num_fewshot", int, "examples before each document; by default as the tasks say", at_least=0),
        Option("limit", int, "only the first examples of each task (all; RULER: 500 at each length)", at_least=1),
        Option(
            "length",
            int,
            "longest input in tokens (the training length; for RULER's tasks each of lengths=)",
            at_least=1,
        ),
        Option("lengths", str, "lengths of RULER's samples (length=, or the training length)", metavar="4096,8192"),
        Option(
            "stand_in",
            str,
            "other source texts for RULER's samples",
            metavar="essays:FILE,squad:FILE,hotpotqa:FILE",
        ),
        Option(
            "part",
            str,
            "part I of N of the tasks, for several jobs: every N-th task from the I-th on, counted from 0 (RULER's tasks "
            "count as one; the first part has the validation loss)",
            metavar="I/N",
            default="0/1",
        ),
        Option("tensor", int, "tensor-parallel processes; groups of this size share the work", default=1, at_least=1),
        Option("valid", bool, "loss over the whole validation split (true without suite=)"),
        Option(
            "baseline",
            bool,
            "also a Kneser–Ney bigram of the same training tokens (true up to 50 million training tokens)",
        ),
        Option(
            "samples",
            bool,
            "write every example with its prompts, log-likelihoods or texts, target and metrics to "
            "RUN/eval/step-XXXXXXXX-samples/TASK.jsonl",
        ),
        Option(
            "missing",
            bool,
            "only tasks that the results file lacks: the same command continues after it was stopped",
        ),
        Option("out", str, "a folder instead of RUN/eval, or a .json file", metavar="PATH"),
        Option("data", str, "the data folder, if it differs from that of the training", metavar="FOLDER"),
        *workers.OPTIONS,
    ),
    keys=CHANGEABLE,
)
# Options that `Settings` takes as they are given.
KEPT = ("eval_data", "num_fewshot", "limit", "length", "lengths", "stand_in", "tensor", "out", "data")
KEYED = ("limit", "length", "num_fewshot")  # results with these settings have their own file
TIMEOUT_MINUTES = 24 * 60.0  # how long a rank may wait for the other ranks' share of a task


@dataclass(frozen=True)
class Settings:
    """The options of the command."""

    names: list[str]
    ruler: list[str]
    include: tuple[str, ...] = ()
    suite: str | None = None
    eval_data: str = "data/eval"
    num_fewshot: int | None = None
    limit: int | None = None
    length: int | None = None
    lengths: str | None = None
    stand_in: str | None = None
    tensor: int = 1
    valid: bool = True
    baseline: bool | None = None
    samples: bool = False
    missing: bool = False
    out: str | None = None
    data: str | None = None
    changes: tuple[str, ...] = ()

    @property
    def keyed(self) -> dict[str, int | None]:
        return {key: getattr(self, key) for key in KEYED}

    @property
    def folder_names(self) -> list[str]:
        """Parts of the folder name that keep these results apart from others. RULER's are named by their lengths."""
        keyed = self.keyed if self.names else {"limit": self.limit}
        return [*self.changes, *(f"{key}={value}" for key, value in keyed.items() if value is not None)]


def parse_part(text: str) -> tuple[int, int]:
    """Parses `I/N` to (I, N). Raises UserError."""
    found = re.fullmatch(r"(\d+)/(\d+)", text)
    index, count = (int(number) for number in found.groups()) if found else (0, 0)
    if not index < count:
        raise UserError(f"part must be I/N with I from 0 to N − 1, not {text!r}")
    return index, count


def main(argv: list[str]) -> None:
    options, changes = COMMAND.parse(argv)
    settings = settings_of(options, changes)
    several = workers.Workers.of(options)
    path = checked(options, settings)
    if several is None:
        boot.join_ranks()
    count = several.count if several is not None else boot.world_size()
    if count % settings.tensor:
        raise UserError(f"tensor={settings.tensor} does not divide the number of processes, {count}: set gpus=")
    if several is not None:
        own = [text for text in argv if text.partition("=")[0] not in ("gpus", "processes")]
        boot.leave(several.run("launch/evaluate.py", own, saves=False))
    from eval.checkpoint.environment import prepare

    prepare()
    boot.log(logging.WARNING, force=False)
    evaluate(path, settings, Console(quiet=boot.rank() != 0, markup=False, emoji=False))


def settings_of(options: dict[str, Any], changes: list[str]) -> Settings:
    """Converts the options to `Settings`. Raises UserError."""
    from eval.checkpoint.paper import SUITE
    from eval.checkpoint.ruler import TASKS

    suite = options.get("suite")
    whole = {"stickbreaking_paper": ",".join(SUITE), "ruler": "ruler", None: "cloze"}
    tasks = options.get("tasks", whole[suite])
    if not any(tasks.split(",")):
        raise UserError(f"tasks={tasks} names no task: write tasks=none to measure the loss alone")
    names = [name for name in tasks.split(",") if name and name != "none"]
    ruler = list(TASKS) if "ruler" in names else [name for name in names if name in TASKS]
    names = [name for name in names if name not in (*ruler, "ruler")]
    index, count = parse_part(options["part"])
    valid = options.get("valid", suite is None)
    if not (names or ruler or valid):
        left_out = "valid=false" if "valid" in options else f"suite={suite}"
        raise UserError(
            f"there is nothing to evaluate: tasks={tasks} names no task, and {left_out} leaves out the loss"
        )
    if not ruler and (options.get("lengths") or options.get("stand_in")):
        raise UserError("lengths and stand_in are for RULER's tasks: name some in tasks=, or all with suite=ruler")
    return Settings(
        names=names[index::count],
        ruler=ruler if len(names) % count == index else [],
        suite=suite,
        valid=index == 0 and valid,
        baseline=options.get("baseline"),
        samples=options.get("samples", False),
        missing=options.get("missing", False),
        include=tuple(folder for folder in options.get("include", "").split(",") if folder),
        changes=tuple(changes),
        **{key: options[key] for key in KEPT if key in options},
    )


def checked(options: dict[str, Any], settings: Settings) -> Path:
    """Checks everything that needs neither torch nor lm-eval, which take seconds to import. Raises UserError.

    Returns the path of the checkpoint or run.
    """
    from eval.checkpoint.task_names import check_request
    from ssscale.config import change
    from ssscale.train.early import check_data
    from ssscale.validate import validate_checkpoint

    path = Path(options["checkpoint"])
    checkpoint = find_checkpoint(path, quiet=True)  # `reading` reports damage
    config = change(saved := saved_config(checkpoint), list(settings.changes))
    validate_checkpoint(config, saved)
    check_request(settings.names, settings.eval_data, include=settings.include)
    if settings.valid or "cloze" in settings.names:
        check_data(config, settings.data, "valid", hint=DATA_HINT)
    check_results(checkpoint, settings)
    return path


def evaluate(path: Path, settings: Settings, console: Console) -> None:
    """Runs all requested evaluations, prints the results and adds them to the results files of the checkpoint.

    path: the checkpoint or its run. Raises UserError at the end if a task failed.
    """
    import torch

    from eval.checkpoint.results import add_results, read_results, results_file
    from eval.checkpoint.suite import Outcome
    from eval.checkpoint.tables import show
    from eval.checkpoint.text import TextTokenizer
    from ssscale.parallel.groups import initialize
    from ssscale.train.build import load_model
    from ssscale.train.reading import reading

    workers.check_device(torch.cuda.is_available())
    changes = list(settings.changes)
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    groups = initialize(settings.tensor, local_rank, TIMEOUT_MINUTES, distributed="RANK" in os.environ)
    with reading(path, groups) as checkpoint:
        file = results_file(checkpoint, settings.folder_names, settings.out)
        check_results(checkpoint, settings)
        model, config = load_model(checkpoint, groups, changes=changes)
        needed = settings.valid or "cloze" in settings.names
        held_out = open_data(config, "valid", settings.data) if needed else None
        tokenizer = TextTokenizer.of_checkpoint(checkpoint, held_out)
    about: dict[str, Any] = {"checkpoint": str(checkpoint), "parameters": model.num_parameters()}
    about |= {"prefix": "BOS before every document"} | ({"changes": changes} if changes else {})
    done = read_results(file).get("tasks", {}) if settings.missing else {}
    ruler = planned(config, tokenizer, settings, console) if settings.ruler else None
    results = about | {"settings": settings.keyed}
    outcome, left = Outcome(), replace(settings, names=[name for name in settings.names if name not in done])
    if left.names:
        outcome = evaluate_tasks(model, config, tokenizer, held_out, left, file, results, console)
    if ruler is not None:
        from eval.checkpoint.ruler.run import evaluate_ruler, ruler_table

        cells = evaluate_ruler(ruler, model, tokenizer, config.name, file, results, console, done)
    losses: dict[str, Loss] = {}
    if settings.valid:
        assert held_out is not None
        losses = evaluate_losses(model, config, held_out, settings, console)
        about["data_fingerprint"] = held_out.fingerprint
    if not groups.is_main:
        return
    if losses:  # of the whole split; limits apply to tasks only
        found = {name: loss.to_json() for name, loss in losses.items()}
        add_results(results_file(checkpoint, changes, settings.out), about | found)
    show(console, checkpoint, outcome.results, losses, ", ".join(settings.folder_names))
    if ruler is not None:
        console.print(ruler_table(ruler, cells))
    if settings.suite == "stickbreaking_paper":
        from eval.checkpoint.paper import show_paper

        show_paper(read_results(file).get("tasks", {}), config.name, console)  # includes the results of other parts
    console.print(f"results: {file}", highlight=False, soft_wrap=True)
    outcome.check(str(file))


def check_results(checkpoint: Path, settings: Settings) -> None:
    """Checks the results files before the work rather than after it. Raises UserError."""
    from eval.checkpoint.results import check_same, check_writable, read_results, results_file

    for names in (list(settings.changes), settings.folder_names):
        file = results_file(checkpoint, names, settings.out)
        read_results(file)
        if boot.rank() == 0:
            check_writable(file)
        if settings.out is not None:
            check_same(file, checkpoint, settings.keyed)


def planned(config: "Config", tokenizer: "TextTokenizer", settings: Settings, console: Console) -> "Ruler":
    """Prepares RULER's tasks. Raises UserError."""
    try:
        from eval.checkpoint.ruler.plan import plan_ruler
    except ModuleNotFoundError as error:
        raise UserError(f"RULER's tasks need {error.name}: pip install 'lm-eval[ruler]', or make setup") from None

    asked = (settings.ruler, settings.lengths, settings.length, settings.limit, settings.eval_data, settings.stand_in)
    return plan_ruler(*asked, config.data.length, tokenizer, console)


def open_data(config: "Config", split: str, path: str | None) -> "PackedData":
    """Opens a split of the run's data folder and checks it against the run. Raises UserError."""
    from ssscale.train import build

    return build.open_data(config, split, path, hint=DATA_HINT)


def evaluate_tasks(
    model: "Decoder",
    config: "Config",
    tokenizer: "TextTokenizer",
    held_out: "PackedData | None",
    settings: Settings,
    file: Path,
    results: dict[str, Any],
    console: Console,
) -> "Outcome":
    """Evaluates lm-eval tasks. Each task is added to the results file, together with `results`, when it is done."""
    import torch.distributed as dist

    from eval.checkpoint.cloze import build_items, write_items
    from eval.checkpoint.harness import PackedLM
    from eval.checkpoint.results import add_results
    from eval.checkpoint.samples import samples_file, write_samples
    from eval.checkpoint.suite import Samples, find_tasks, run_tasks
    from eval.checkpoint.text import held_out as held_out_texts

    names, is_main = settings.names, model.groups.is_main
    items = file.with_name("cloze.jsonl")
    metadata = {"cloze_items": str(items), "eval_data": settings.eval_data}
    manager = find_tasks(names, metadata, settings.include)
    if "cloze" in names:
        assert held_out is not None
        if is_main:
            write_items(build_items(held_out_texts(held_out, tokenizer), tokenizer, config.data.length), items)
        dist.barrier()

    def keep(result: "TaskResult", samples: Samples) -> None:
        if is_main:
            add_results(file, results | {"tasks": {result.task: result.to_json()}})
            if settings.samples and samples:
                write_samples(samples_file(file, result.task), result.task, samples)

    def failed(task: str, reason: str) -> None:
        console.print(f"{task} failed: {reason}", highlight=False, markup=False, soft_wrap=True)

    length = settings.length or config.data.length
    lm = PackedLM(model, tokenizer, length, name=config.name, show=is_main)
    began = time.perf_counter()
    outcome = run_tasks(lm, names, manager, settings.limit, settings.num_fewshot, keep, failed)
    seconds = time.perf_counter() - began
    console.print(f"{', '.join(names)}: {seconds:.0f} s", highlight=False)
    return outcome


def evaluate_losses(
    model: "Decoder",
    config: "Config",
    held_out: "PackedData",
    settings: Settings,
    console: Console,
) -> "dict[str, Loss]":
    """Returns the losses on the whole validation split: `valid` of the model, `baseline` of the bigram."""
    from eval.checkpoint.validation import bigram_fits, bigram_loss, model_loss

    one_document = config.data.one_document
    microbatch, baseline = config.train.microbatch_rows, settings.baseline
    losses = {"valid": model_loss(model, held_out, microbatch, one_document, show=model.groups.is_main)}
    if baseline is not False and model.groups.is_main:
        train = open_data(config, "train", settings.data)
        if baseline or bigram_fits(train):
            losses["baseline"] = bigram_loss(train, held_out, one_document)
        else:
            console.print("no Kneser–Ney bigram: more than 50 million training tokens (baseline=true makes one)")
    return losses


if __name__ == "__main__":
    boot.run(COMMAND, main)
