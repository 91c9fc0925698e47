"""Fine-tune on question answering. The same command continues a run that was stopped.

This is the recipe of arXiv:2501.19399, Section 3.3 and Table 3: the loss is summed over the tokens of the answers.
Questions without an answer and examples longer than the run's rows are left out. Several processes share each batch:
gpus=, torchrun or srun.
"""

import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launch import boot, workers
from launch.boot import Command, Option
from launch.process import follow_launcher
from launch.training import check_writable, train_on_ranks
from ssscale.errors import UserError
from ssscale.train.checkpoint_folder import find_checkpoint, saved_config
from ssscale.train.lock import check_unused
from ssscale.train.signals import StopSignals

if TYPE_CHECKING:
    from ssscale.config.schema import Config

logger = logging.getLogger("ssscale")

COMMAND = Command(
    about=__doc__,
    usage="python launch/finetune.py from=RUN questions=FILE[,FILE...] run_dir=FOLDER [gpus=N] [key=value ...]",
    example="python launch/finetune.py from=runs/1b_sb questions=train-v2.0.json run_dir=runs/1b_sb_squad gpus=8",
    options=(
        Option(
            "from", str, "a run folder (its newest checkpoint) or a checkpoint folder", metavar="RUN", required=True
        ),
        Option(
            "questions",
            str,
            "files in the JSON format of SQuAD 1.1 or 2.0, .zst or not",
            metavar="FILE[,FILE...]",
            required=True,
        ),
        Option("run_dir", str, "the folder of the new run", metavar="FOLDER", required=True),
        Option("epochs", float, "passes over the examples", default=10.0, above=0),
        Option("lr", float, "peak learning rate", default=2e-5, above=0),
        Option("batch", int, "examples per step", default=128, at_least=1),
        Option("microbatch", int, "examples per forward pass (32, or the batch)", at_least=1),
        *workers.OPTIONS,
    ),
    keys=("data.", "train."),
)
# Beginnings of keys whose values fine-tuning chooses, and the options that say them.
IN_ITS_PLACE = {
    "train.batch_size": "batch=",
    "train.microbatch": "microbatch=",
    "train.max_steps": "epochs=",
    "train.stages": "lr= and epochs=",
}
EVALUATES = ("train.eval_", "train.task", "train.keep_best")  # beginnings of keys of what fine-tuning does not do


def main(argv: list[str]) -> None:
    options, changes = COMMAND.parse(argv)
    several = workers.Workers.of(options)
    if several is not None:
        checked(options, changes)
        own = [text for text in argv if text.partition("=")[0] not in ("gpus", "processes")]
        boot.leave(several.run("launch/finetune.py", own))
    with StopSignals() as signals:
        follow_launcher()
        boot.join_ranks()
        finetune(options, *checked(options, changes), signals)


def checked(options: dict[str, Any], changes: list[str]) -> "tuple[Path, Config]":
    """Returns the checkpoint and its changed configuration. Raises UserError for mistakes that show without torch."""
    from ssscale.config import change
    from ssscale.validate import validate_checkpoint

    for key, option in IN_ITS_PLACE.items():
        if given := next((text for text in changes if text.partition("=")[0].startswith(key)), None):
            raise UserError(f"{given} has no effect here: use {option}")
    if given := next((text for text in changes if text.startswith(EVALUATES)), None):
        raise UserError(f"{given} has no effect here: fine-tuning has no validation split and scores no tasks")
    checkpoint = find_checkpoint(Path(options["from"]), "from", quiet=True)  # the run reports damage
    # A pretraining run may have kept its best checkpoint, which would bind this one to its eval_every and save_every.
    saved = saved_config(checkpoint)
    config = change(saved, [*changes, "train.keep_best=false"])
    validate_checkpoint(config, saved)
    files = options["questions"].split(",")
    for index, file in enumerate(files):
        if not Path(file).is_file():
            raise UserError(f"questions={file}: there is no such file")
        if any(os.path.samefile(file, other) for other in files[:index]):
            raise UserError(f"questions={options['questions']}: {file} is named twice")
    check_unused(Path(options["run_dir"]))
    check_writable(options["run_dir"])
    return checkpoint, config


def finetune(options: dict[str, Any], checkpoint: Path, before: "Config", signals: StopSignals) -> None:
    boot.log()
    import torch

    from eval.checkpoint.text import TextTokenizer
    from ssscale.data.questions import make_example, read_squad
    from ssscale.train.finetune import finetuning, finetuning_config
    from ssscale.validate import validate

    workers.check_device(torch.cuda.is_available())
    tokenizer = TextTokenizer.of_checkpoint(checkpoint, None)
    questions = [question for file in options["questions"].split(",") for question in read_squad(Path(file))]
    every = [make_example(question, tokenizer.encode, tokenizer.bos_id) for question in questions]
    examples = [example for example in every if len(example.tokens) <= before.data.length]
    longer = len(every) - len(examples)
    logger.info("%d examples, %d longer than %d tokens left out", len(every), longer, before.data.length)
    config = finetuning_config(
        before,
        options["from"],
        options["run_dir"],
        num_examples=len(examples),
        epochs=options["epochs"],
        lr=options["lr"],
        batch=options["batch"],
        microbatch=options.get("microbatch", min(32, options["batch"])),
    )
    validate(config, boot.world_size(), gpu=torch.cuda.is_available())
    kept = [checkpoint / name for name in ("tokenizer.json", "boundaries.json")]
    files = {file.name: file.read_text() for file in kept if file.is_file()}
    job = os.environ.get("SLURM_JOB_ID")
    train_on_ranks(config, lambda groups: finetuning(config, groups, examples, files, signals, job))


if __name__ == "__main__":
    boot.run(COMMAND, main)
