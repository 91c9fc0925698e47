"""`train.straggler_every`: names the ranks that hold up the others, because they take longer for the same work."""

import logging
import socket
import statistics
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from ssscale.parallel.exchange import gather_json
from ssscale.train.hooks.base import Hook
from ssscale.train.hooks.guard import listed

if TYPE_CHECKING:
    from ssscale.train.run import Run
    from ssscale.train.step import Agreed, Done

logger = logging.getLogger("ssscale")

LIMIT = 1.15  # times the median of the others
# The phases of a step in which a rank waits for no other replica, by ZeRO stage. Stage 2 reduces gradients during the
# backward pass, and stage 3 also gathers weights during both passes, so that a slow rank slows the others' phases too.
OWN_PHASES = {0: ("data", "forward", "backward"), 1: ("data", "forward", "backward"), 2: ("data", "forward")}


class Stragglers(Hook):
    """Compares the seconds that the ranks compute and wait for data per step, without their waiting for each other.

    The times are those of the marks that `Phases` sets in every step anyway. On a GPU they are events. They are read once
    per interval, so that no other step waits for the GPU. A rank is named if its median step was above LIMIT times the
    median of the others in the first half of the interval as well as in the second. The ranks of a tensor-parallel or
    context-parallel group wait for each other within both passes. They are compared and named together.
    """

    every = 1  # it notes the marks of each step

    def __init__(self, interval: int) -> None:
        self.interval = interval
        self.first = 0  # index of the first mark of the step
        self.steps: list[list[tuple[str, Any]]] = []  # marks of each step since the last comparison
        self.said = False  # whether the log says that this layout cannot be compared

    def agreed(self, run: "Run", agreed: "Agreed") -> None:
        self.first = len(run.phases.marks)

    def act(self, run: "Run", done: "Done") -> None:
        self.steps.append(run.phases.marks[self.first :])
        if run.state.step % self.interval:
            return
        steps, self.steps = self.steps, []
        phases = OWN_PHASES.get(run.config.parallel.zero_stage)
        if phases is None or run.groups.data_size == 1:
            if not self.said:
                self.said = True
                logger.info("train.straggler_every: ranks of this layout wait for each other too often to be compared")
            return
        mine = halves([own_seconds(marks, phases, run.phases.cuda) for marks in steps])
        data = statistics.median(own_seconds(marks, ("data",), run.phases.cuda) for marks in steps)
        found = gather_json([run.groups.data_rank, *mine, socket.gethostname(), data])
        if run.groups.is_main:
            record = {"step": run.state.step, "tokens": run.state.tokens}
            run.metrics.write(record | verdict(found, run.state.step))


def stragglers(interval: int) -> list[Hook]:
    """Returns the hook, or nothing if it is off or there is one rank."""
    several = dist.is_initialized() and dist.get_world_size() > 1
    return [Stragglers(interval)] if interval and several else []


def own_seconds(marks: Sequence[tuple[str, Any]], phases: Sequence[str], cuda: bool) -> float:
    """Returns the seconds of these phases in one step. marks: of `Phases`, beginning with the step's first phase."""
    if cuda and marks:
        marks[-1][1].synchronize()
    pairs = [(begin, end) for (phase, begin), (_, end) in pairwise(marks) if phase in phases]
    return sum(begin.elapsed_time(end) / 1e3 if cuda else end - begin for begin, end in pairs)


def halves(seconds: Sequence[float]) -> tuple[float, float]:
    """Returns the medians of the first and of the second half of the steps.

    If the number of steps is odd, the step in the middle belongs to the first half. A single step is both halves."""
    middle = len(seconds) // 2
    return statistics.median(seconds[: middle + len(seconds) % 2]), statistics.median(seconds[middle:])


def ratios(seconds: Mapping[int, Sequence[float]]) -> dict[int, float]:
    """Returns for each group its time divided by the median of the other groups: the smaller of its two halves' ratios.

    seconds: two medians (`halves`) by group, for two groups or more.
    """
    ordered = [sorted(half) for half in zip(*seconds.values(), strict=True)]
    return {
        group: min(time / _median_without(time, half) for time, half in zip(own, ordered, strict=True))
        for group, own in seconds.items()
    }


def _median_without(value: float, ordered: Sequence[float]) -> float:
    """Returns the median of `ordered` after one `value` is left out.

    `ordered` is ascending and the same for all groups, so it is sorted only once.
    """
    place, last = bisect_left(ordered, value), len(ordered) - 2
    low, high = (ordered[middle + (middle >= place)] for middle in (last // 2, (last + 1) // 2))
    return (low + high) / 2


def verdict(found: Sequence[tuple[int, float, float, str, float]], step: int) -> dict[str, Any]:
    """Returns the metrics of a comparison, and logs the ranks that are above LIMIT.

    found: by rank, its data-parallel rank, its two medians in seconds, its host, and the median of its waits for data in
    seconds.
    """
    members: dict[int, list[int]] = {}  # by data-parallel rank
    for rank, (group, *_) in enumerate(found):
        members.setdefault(group, []).append(rank)
    seconds = {
        group: [
            statistics.median(found[rank][1] for rank in ranks),
            statistics.median(found[rank][2] for rank in ranks),
        ]
        for group, ranks in members.items()
    }
    above = ratios(seconds)
    slowest = max(above, key=above.__getitem__)
    record: dict[str, Any] = {
        "seconds/compute": statistics.median(statistics.fmean(own) for own in seconds.values()),
        "straggler/ratio": above[slowest],
        "straggler/rank": members[slowest][0],
    }
    named = []
    for group, ratio in above.items():
        if ratio > LIMIT:
            ranks = members[group]
            hosts = listed(list(dict.fromkeys(found[rank][3] for rank in ranks)))
            who = f"rank {listed(ranks)} on {hosts}" if len(ranks) == 1 else f"one of rank {listed(ranks)} on {hosts}"
            named.append(f"{who} ({ratio:.2f})")
            data = max(found[rank][4] for rank in ranks)
            usual = statistics.median(other[4] for other in found if other[0] != group)
            more = min(seconds[group]) * (1 - 1 / ratio)  # seconds by which it is slower
            said = f"step {step}: {who} takes {ratio:.2f} times as long to compute a step as the others"
            if 2 * (data - usual) > more:
                logger.warning("%s, %.2g s of it waiting for data: look at the disks and CPUs of its host", said, data)
            else:
                logger.warning(
                    "%s: look at the clock and temperature of its GPU, and for other processes on its host", said
                )
    return record | ({"stragglers": "; ".join(named)} if named else {})
