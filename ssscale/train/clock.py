"""Measures the speed of training and the time of each phase of a step."""

import statistics
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch


class Stopwatch:
    """Measures training speed in tokens per second, without pauses (evaluation, checkpoints)."""

    def __init__(self, tokens: int) -> None:
        self.start, self.tokens = time.perf_counter(), tokens
        self.last = self.start
        self.quiet: deque[float] = deque(maxlen=20)  # seconds of recent steps during which nothing was saved
        self.busy: list[float] = []  # seconds of the steps during the newest save

    def step(self, saving: bool) -> None:
        """Records the end of a step. saving: whether a checkpoint was being written."""
        now = time.perf_counter()
        (self.busy.append if saving else self.quiet.append)(now - self.last)
        self.last = now

    def dip(self) -> float | None:
        """Returns the fraction of speed that was lost while the newest checkpoint was written; None if no step was timed."""
        busy, self.busy = self.busy, []
        if not busy or not self.quiet:
            return None
        # The mean of the busy steps counts a single long step; the median of the others ignores one that compiled.
        return 1 - statistics.median(self.quiet) / statistics.fmean(busy)

    def lap(self, tokens: int) -> float:
        """Returns the tokens per second since the last lap. tokens: `Source.computed`."""
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


FIRST = "agreement"  # the phase with which a step begins


class Phases:
    """Measures the seconds per step of each phase, with the GPU's clock if there is a GPU.

    `communication` is the reduction after backward. What is reduced during backward (ZeRO 2 and 3, `parallel.overlap`) counts
    as backward, and a wait for weights within the forward pass as forward. `agreement`
    is the small reduction over all ranks with which a step begins. `data` is the wait for the batches of the next step,
    as far as it outlasts the backward pass on a GPU. `hooks` is the rest until the next step, in which the host reads the
    loss and runs the hooks. A GPU has the update to do meanwhile, and only what outlasts it counts.
    """

    def __init__(self, cuda: bool, step: int) -> None:
        self.cuda, self.step = cuda, step
        self.marks: list[tuple[str, Any]] = []
        self.on_mark: Callable[[str], None] | None = None  # called at each mark, with the phase

    def mark(self, phase: str) -> None:
        moment: Any = time.perf_counter()
        if self.cuda:
            moment = torch.cuda.Event(enable_timing=True)
            moment.record()
        self.marks.append((phase, moment))
        if self.on_mark is not None:
            self.on_mark(phase)

    def lap(self, step: int) -> dict[str, float]:
        """Returns the seconds per step as `seconds/PHASE`, for the steps since the last lap but the newest one.

        step: number of the newest step. A GPU may not have ended it, and the host should not wait for that. A later lap has
        it. Returns nothing if it is the only step.
        """
        first = max((i for i, (phase, _) in enumerate(self.marks) if phase == FIRST), default=0)
        marks, self.marks = self.marks[: first + 1], self.marks[first:]
        steps, self.step = step - 1 - self.step, step - 1
        if steps == 0:
            return {}
        seconds: Counter[str] = Counter()
        for (phase, begin), (_, end) in pairwise(marks):
            seconds[phase] += begin.elapsed_time(end) / 1e3 if self.cuda else end - begin
        return {f"seconds/{phase}": total / steps for phase, total in seconds.items()}
