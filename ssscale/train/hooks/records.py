"""A run's metrics at `train.log_every`: loss, learning rate, gradient norm, speed, and where the time of a step goes."""

import time
from collections import Counter
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from ssscale.train.hooks.base import Hook
from ssscale.train.metrics import speed, step_record

if TYPE_CHECKING:
    from ssscale.train.run import Run
    from ssscale.train.step import Done


class Records(Hook):
    def __init__(self, every: int) -> None:
        self.every = every

    def act(self, run: "Run", done: "Done") -> None:
        state, sums = run.state, done.sums
        dist.all_reduce(sums, group=run.groups.replica_group)
        record = step_record(run.config, state.step, state.tokens, sums, run.source.names, done.lr, done.grad_norm)
        if done.terms:
            terms = torch.stack(list(done.terms.values()))
            dist.all_reduce(terms, group=run.groups.replica_group)
            record |= zip([f"term/{name}" for name in done.terms], (terms / sums[1].sum()).tolist(), strict=True)
        record |= run.source.counts(state.samples)
        record |= speed(run.watch.lap(state.tokens), run.config, run.groups)
        run.metrics.write(record | run.phases.lap(state.step))
        run.events.write(b"")  # what a full disk may not have taken


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
