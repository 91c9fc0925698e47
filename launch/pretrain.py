"""Pretrain a model. The same command continues a run that was stopped.

gpus=8 starts eight processes on this machine. torchrun and srun (one task per GPU) can start them on several machines.
Without any of these, one process trains. Exit codes: 0 finished, 2 bad input, 70 unexpected error, 75 stopped by a
signal after saving, 76 a step took too long or a rank was lost, 77 losses stay NaN, 78 out of GPU memory, 79 ranks hold
different copies of a weight, 128 + signal: ended by a second signal or by kill -9, without saving. After 75, 76, 79 and
128 + signal, run the same command again. docs/reference/exit_codes.md says more.
"""

import logging
import os
import warnings
from typing import TYPE_CHECKING

from launch import boot, workers
from launch.boot import EVERY_KEY, Command, Option
from launch.process import follow_launcher
from launch.training import check_writable, train_on_ranks
from ssscale.train.signals import StopSignals

if TYPE_CHECKING:
    from ssscale.config.schema import Config

logger = logging.getLogger("ssscale")

COMMAND = Command(
    about=__doc__,
    usage="python launch/pretrain.py config=NAME [gpus=N] [key=value ...] [--print]",
    example="python launch/pretrain.py config=3b_sb gpus=8 train.microbatch=2",
    options=(*workers.OPTIONS, Option("--print", bool, "print the merged configuration as YAML and train nothing")),
    keys=EVERY_KEY,
)


def main(argv: list[str]) -> None:
    options, arguments = COMMAND.parse(argv)
    if options.get("--print"):
        from ssscale.config import load_config, to_yaml

        print(to_yaml(load_config(arguments, options=COMMAND.names)), end="")
        return
    several = workers.Workers.of(options)
    if several is not None:
        checked(arguments, several.count, several.gpu)
        boot.leave(several.run("launch/pretrain.py", arguments))
    with StopSignals() as signals:  # before anything slow, so that signals during the start are handled
        follow_launcher()
        boot.join_ranks()
        pretrain(checked(arguments, boot.world_size(), workers.gpus_here() > 0), signals)


def checked(arguments: list[str], world_size: int, gpu: bool) -> "Config":
    """Returns the run's configuration. Raises UserError for mistakes that can be found before torch is imported,
    which takes seconds.
    """
    from ssscale.config import load_config
    from ssscale.train.early import check_run
    from ssscale.validate import validate

    config = load_config(arguments, options=COMMAND.names)
    validate(config, world_size, gpu=gpu)
    check_run(config)
    check_writable(config.folder)
    if config.train.tasks:
        from eval.checkpoint.task_names import check_request

        train = config.train
        check_request(train.tasks, train.task_data, "train.tasks", train.task_include)
    return config


def pretrain(config: "Config", signals: StopSignals) -> None:
    boot.log()
    if "RANK" not in os.environ and workers.gpus_here() > 1:
        logger.warning("the run uses only one of %d GPUs: gpus=%d uses all", workers.gpus_here(), workers.gpus_here())
    warnings.filterwarnings("ignore", module="deepspeed|torch.distributed")  # they concern features that we do not use
    if config.train.tasks:
        from eval.checkpoint.environment import prepare

        prepare()  # before torch, whose import reads what hides progress bars
    import torch

    from ssscale.train.advice import learning_rate_advice
    from ssscale.validate import validate

    workers.check_device(torch.cuda.is_available())
    validate(config, boot.world_size(), gpu=torch.cuda.is_available())
    advice = learning_rate_advice(config)
    if advice is not None:
        logger.warning("warning: %s", advice)

    from ssscale.train.pretrain import pretraining

    tasks = None
    if config.train.tasks:
        from eval.checkpoint.in_training import TaskEvaluation

        tasks = TaskEvaluation(config)  # raises for unknown tasks and missing data before the first step

    job = os.environ.get("SLURM_JOB_ID")
    train_on_ranks(config, lambda groups: pretraining(config, groups, signals, job, tasks))


if __name__ == "__main__":
    boot.run(COMMAND, main)
