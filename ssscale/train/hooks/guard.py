"""Checks that all copies of a weight are equal, however the model is divided, and that gradients reach all weights."""

import logging
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from ssscale.engine.base import Engine
from ssscale.errors import UNEQUAL, Stop
from ssscale.parallel.groups import Groups
from ssscale.train.hooks.base import Hook

if TYPE_CHECKING:
    from ssscale.train.run import Run
    from ssscale.train.step import Done

logger = logging.getLogger("ssscale")


class Reached(Hook):
    """Warns after the first step of a run about weights that no gradient has reached."""

    at = 1

    def act(self, run: "Run", done: "Done") -> None:
        if not done.skipped and (names := without_gradient(run.engine, run.groups)):
            logger.warning(
                "the gradients of %s were exactly 0 in the first step: check that these weights influence the loss",
                listed(names),
            )


class Guard(Hook):
    """`train.guard_every`: compares the copies of weights (`check_copies`)."""

    def __init__(self, every: int) -> None:
        self.every = every

    def act(self, run: "Run", done: "Done") -> None:
        check_copies(run.engine, run.groups, run.state.step)


def check_copies(engine: Engine, groups: Groups, step: int) -> None:
    """Raises Stop on all ranks, naming a weight and the ranks, if copies of a weight differ.

    Each rank reads its weights once and adds up the memory of each tensor as 64-bit integers. These sums are compared, and
    the weights are not sent. A single flipped bit always changes the sum. Several differences could cancel each other.
    """
    names, sums, owners = [], [], []
    for name, weight, owner in engine.copies():
        names.append(name)
        sums.append(bit_sum(weight))
        owners.append(owner)
    if not names:
        return
    mine = torch.stack((torch.stack(sums).cpu(), torch.tensor(owners)))
    every = [torch.empty_like(mine) for _ in range(groups.world_size)]
    dist.all_gather(every, mine)
    for number, name in enumerate(names):
        # owner → rank → sum. Ranks with the same owner hold copies of the same part of the weight (`Engine.copies`).
        found: dict[int, dict[int, int]] = {}
        for rank, (theirs, theirs_of) in enumerate(torch.stack(every)[:, :, number].tolist()):
            found.setdefault(theirs_of, {})[rank] = theirs
        for copies in found.values():
            if len(set(copies.values())) > 1:
                raise Stop(f"step {step}: {_sentence(name, copies)}", UNEQUAL)


def bit_sum(weight: Tensor) -> Tensor:
    """Returns the sum of the 64-bit words of a tensor modulo 2^64, an int64 scalar."""
    data = weight.detach().flatten().view(torch.uint8)
    if len(data) % 8 or data.storage_offset() % 8:
        data = torch.nn.functional.pad(data, (0, -len(data) % 8)).clone()
    return data.view(torch.int64).sum()


def without_gradient(engine: Engine, groups: Groups) -> list[str]:
    """Returns the names of the weights whose gradients have been exactly 0 on all ranks so far: their momentum is 0."""
    names = [name for name, _ in engine.module.named_parameters()]
    largest = torch.zeros(len(names), device=groups.device)
    places = {name: largest[place] for place, name in enumerate(names)}
    for fragment in engine.fragments():
        if fragment.state == engine.kind.momentum and fragment.tensor.numel():
            place = places[fragment.name]
            torch.maximum(place, fragment.tensor.abs().amax(), out=place)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    return [name for name, value in zip(names, largest.tolist(), strict=True) if value == 0]


def _sentence(name: str, copies: dict[int, int]) -> str:
    usual, count = Counter(copies.values()).most_common(1)[0]
    agree = [rank for rank, value in copies.items() if value == usual]
    others = [rank for rank in copies if rank not in agree]
    if 2 * count > len(copies):
        suspects, what = others, f"{name} on {_ranks(others)} differs from that on {_ranks(agree)}"
    else:
        suspects = list(copies)
        what = f"{name} differs between {_ranks(suspects)}"
    return (
        f"{what}: run the same command again to continue from the last checkpoint; if it happens again, exclude the machine "
        f"of {_ranks(suspects)}{', one at a time to find the faulty one' if len(suspects) > 1 else ''}"
    )


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'' if len(ranks) == 1 else 's'} {listed(ranks)}"


def listed(things: Sequence[object]) -> str:
    """Joins the first eight things, and says how many more there are."""
    shown = ", ".join(map(str, things[:8]))
    return shown if len(things) <= 8 else f"{shown} and {len(things) - 8} more"
