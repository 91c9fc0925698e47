"""Pretrain a model: torchrun --nproc_per_node=8 launch/pretrain.py config=3b_sb [key=value ...]

The same command continues a run that was stopped. torchrun starts one process a GPU, as srun does with one task a GPU;
plain python runs one process. Exit codes: 0 finished, 2 bad input, 70 an error that nobody foresaw, 75 a signal asked to
stop and the step is saved, 76 a step took too long or a rank is gone, 77 losses stay NaN, 78 out of memory; 75 and 76 call
for the same command again.
"""

import logging
import os
import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

if not __package__:  # started as a script: launch/ itself must not shadow packages named as its files
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from launch.cli import run
from launch.process import follow_launcher, rank_environment

if TYPE_CHECKING:
    from ssscale.train.signals import StopSignals


def main(argv: list[str]) -> None:
    from ssscale.train.signals import StopSignals

    with StopSignals() as signals:  # before anything slow: a signal during the start must not lose its meaning
        pretrain(argv, signals)


def pretrain(argv: list[str], signals: "StopSignals") -> None:
    follow_launcher()
    os.environ |= rank_environment(os.environ)
    import torch

    from ssscale.config import load_config, validate
    from ssscale.errors import TOGETHER, Stop
    from ssscale.train.advice import learning_rate_advice

    config = load_config(argv)
    rank = int(os.environ.get("RANK", "0"))
    logging.basicConfig(level=logging.WARNING if rank == 0 else logging.ERROR, format="%(message)s", force=True)
    for name in ("ssscale", "kernels"):
        logging.getLogger(name).setLevel(logging.INFO if rank == 0 else logging.ERROR)
    warnings.filterwarnings("ignore", module="deepspeed|torch.distributed")  # about parts that we do not use
    validate(config, int(os.environ.get("WORLD_SIZE", "1")), gpu=torch.cuda.is_available())
    advice = learning_rate_advice(config)
    if advice is not None:
        logging.getLogger("ssscale").warning("warning: %s", advice)

    from ssscale.parallel.groups import initialize, shutdown, shutdown_together
    from ssscale.train.build import memory_of
    from ssscale.train.estimate import check_memory
    from ssscale.train.trainer import Trainer

    tasks = None
    if config.train.tasks:
        from eval.environment import prepare

        prepare()
        from eval.in_training import TaskEvaluation

        tasks = TaskEvaluation(
            config
        )  # tasks that are unknown and data that is missing are said before a step is trained

    parallel, local_rank = config.parallel, int(os.environ.get("LOCAL_RANK", "0"))
    groups = initialize(
        parallel.tensor,
        local_rank,
        # Longer than the watchdog waits: it names the rank, NCCL's own timeout only aborts the process.
        timeout_minutes=max(10.0, config.train.watchdog / 60 + 5),
        distributed="RANK" in os.environ,
        ulysses=parallel.ulysses,
        ring=parallel.ring,
    )
    check_memory(config, groups.world_size, memory_of(groups.device))
    try:
        Trainer(config, groups, signals, slurm_job=os.environ.get("SLURM_JOB_ID"), tasks=tasks).run()
    except Stop as stop:
        if stop.code in TOGETHER:
            shutdown_together()
        raise
    shutdown()  # not after an error: the other ranks may be inside a collective, and the launcher ends them


if __name__ == "__main__":
    run(main, __doc__)
