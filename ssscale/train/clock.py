"""Where the time of a run goes: its rate, and the phases of a step."""

import statistics
import time
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch


class Stopwatch:
    """Tokens a second of training, without what was paused (evaluation, checkpoints)."""

    def __init__(self, tokens: int) -> None:
        self.start, self.tokens = time.perf_counter(), tokens
        self.last = self.start
        self.quiet: deque[float] = deque(maxlen=20)  # seconds of the newest steps without a save beside them
        self.busy: list[float] = []  # of those beside the newest save

    def step(self, saving: bool) -> None:
        """A step has ended; whether a checkpoint was being written."""
        now = time.perf_counter()
        (self.busy.append if saving else self.quiet.append)(now - self.last)
        self.last = now

    def dip(self) -> float | None:
        """The share of the rate that was lost while the newest checkpoint was written; None where no step tells."""
        busy, self.busy = self.busy, []
        if not busy or not self.quiet:
            return None
        # One long step is a loss too, so the mean of the busy ones; a quiet one may have had to compile.
        return 1 - statistics.median(self.quiet) / statistics.fmean(busy)

    def lap(self, tokens: int) -> float:
        """The rate since the last lap, given the tokens trained in all."""
        now = time.perf_counter()
        rate = (tokens - self.tokens) / (now - self.start)
        self.start, self.tokens = now, tokens
        return rate

    @contextmanager
    def paused(self) -> Iterator[None]:
        began = time.perf_counter()
        yield
        paused = time.perf_counter() - began
        self.start += paused
        self.last += paused


class Phases:
    """Seconds per step by phase, on the GPU's own clock where there is one.

    `communication` is the reduction after backward; what ZeRO 2 and 3 reduce meanwhile counts as backward. `data` is
    the wait for the loader, `agreement` the one small reduction over all ranks that a step begins with.
    """

    def __init__(self, cuda: bool, step: int) -> None:
        self.cuda, self.step = cuda, step
        self.marks: list[tuple[str, Any]] = []

    def mark(self, phase: str) -> None:
        moment: Any = time.perf_counter()
        if self.cuda:
            moment = torch.cuda.Event(enable_timing=True)
            moment.record()
        self.marks.append((phase, moment))

    def lap(self, step: int) -> dict[str, float]:
        """`seconds/phase` per step since the last lap."""
        if self.cuda and self.marks:
            self.marks[-1][1].synchronize()
        seconds: Counter[str] = Counter()
        for (phase, begin), (_, end) in pairwise(self.marks):
            seconds[phase] += begin.elapsed_time(end) / 1e3 if self.cuda else end - begin
        self.marks = self.marks[-1:]
        steps, self.step = step - self.step, step
        return {f"seconds/{phase}": total / steps for phase, total in seconds.items()}
