"""Attention weights out of a core: attention to values of which one column is 1 for some keys is the weight on them.

It holds for every core, position bias, window and remainder alike, and runs whatever kernel the core does.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ssscale.layout import PackedLayout


class Inputs(NamedTuple):
    """What a core was called with: q [T, N, H], rotated and scaled; k [S, K, H]; the layout."""

    core: nn.Module
    q: Tensor
    k: Tensor
    layout: PackedLayout


@contextmanager
def recorded(cores: list[nn.Module]) -> Iterator[list[Inputs]]:
    """The inputs of every call of these cores' `forward`, in the order of the calls."""
    calls: list[Inputs] = []

    def record(core: nn.Module, *inputs: Any) -> Tensor:
        calls.append(Inputs(core, inputs[0].detach(), inputs[1].detach(), inputs[3]))
        return type(core).forward(core, *inputs)

    for core in set(cores):
        core.forward = MethodType(record, core)
    try:
        yield calls
    finally:
        for core in set(cores):
            del core.forward


@torch.no_grad()
def mass(inputs: Inputs, keys: Tensor) -> Tensor:
    """The weights' sums over sets of keys, [T, N, sets] float32. keys: [S, sets] bool, which keys each set has.

    Computed in float32 from the recorded q and k.
    """
    size = inputs.q.shape[-1]
    q, k = inputs.q.float(), inputs.k.float()
    parts = []
    for some in keys.split(size, 1):
        values = torch.nn.functional.pad(some.float(), (0, size - some.shape[1]))
        o = inputs.core(q, k, values[:, None].expand_as(k).contiguous(), inputs.layout)
        parts.append(o[..., : some.shape[1]])
    return torch.cat(parts, -1)


def weights(inputs: Inputs) -> Tensor:
    """All weights of one short sequence, [N, T, T] float32."""
    return mass(inputs, torch.eye(len(inputs.k), dtype=torch.bool, device=inputs.k.device)).transpose(0, 1)
