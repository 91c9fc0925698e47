"""How the models are trained. Imports no torch."""

import math
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ssscale.errors import UserError

if TYPE_CHECKING:
    from eval.papers.mqrar.task import Task

SEEDS = 256  # of trainings: a step has the seed `seed · 2**32 + step`, which stays below `task.TEST_SEED`
# arXiv:2410.17980, Section 5.1: 10^-4, 10^(-10/3), 10^(-8/3), 10^-2.
LEARNING_RATES = tuple(10.0**exponent for exponent in (-4, -10 / 3, -8 / 3, -2))


@dataclass(frozen=True)
class Recipe:
    """AdamW with warmup and cosine decay to 0. Each step trains on new sequences.

    The learning rates are the paper's. It gives neither batch size nor steps, so these are ours. Weight decay, the
    cosine and the end at an accuracy of SOLVED are those of arXiv:2312.04927, from which the task is taken.

    steps: maximum number of steps.
    batch: sequences of full length per step.
    short_first: (share of the steps, length, pairs) of first stages with shorter sequences and fewer pairs. A batch
    keeps its number of tokens. Without these stages, softmax's weights over 768 tokens are so even at first that it
    does not begin to learn in 4,000 steps.
    """

    steps: int = 6000
    batch: int = 64
    short_first: tuple[tuple[float, int, int], ...] = ((0.15, 8, 2), (0.1, 16, 4), (0.1, 64, 16))
    lrs: tuple[float, ...] = LEARNING_RATES
    warmup: float = 0.02  # share of the steps
    weight_decay: float = 0.1
    clip: float = 1.0
    test_every: int = 250
    test_examples: int = 512
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.seed < SEEDS:
            raise UserError(f"--seed={self.seed} must be from 0 to {SEEDS - 1}")

    def factor(self, step: int) -> float:
        """Return the factor of the learning rate at a step from 1 to `steps`."""
        warmup = max(1, round(self.warmup * self.steps))
        if step <= warmup:
            return step / warmup
        return 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, self.steps - warmup)))

    def at(self, step: int, task: "Task") -> "tuple[Task, int]":
        """Return the task and the number of sequences of a step from 1 to `steps`.

        Length and pairs never exceed those of `task`.
        """
        behind = 0.0
        for share, length, pairs in self.short_first:
            behind += share * self.steps
            if step <= behind and length < task.length and pairs <= task.pairs:
                return replace(task, pairs=pairs, length=length), self.batch * task.length // length
        return task, self.batch


@dataclass
class Deadline:
    """The time.monotonic() at which a training stops. A signal handler may bring it forward."""

    at: float = math.inf
    stopped: bool = False  # whether a signal has

    def stop(self) -> None:
        self.stopped = True

    @property
    def passed(self) -> bool:
        return self.stopped or time.monotonic() >= self.at
