"""Attention weights out of a layer: attention to values of which one column is 1 for some keys is the weight on them.

It holds for every mixer, position bias, window and remainder alike, and runs whatever kernel the mixer does.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import MethodType
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from ssscale.layout import PackedLayout


class Layer(Protocol):
    """`ssscale.model.decoder.Attention`, or what stands in for it."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, layout: PackedLayout) -> Tensor: ...


class Inputs(NamedTuple):
    """What a layer's mixer was given: q [T, N, H], rotated and scaled; k [S, K, H]; the layout."""

    layer: Layer
    q: Tensor
    k: Tensor
    layout: PackedLayout


@contextmanager
def recorded(layers: Sequence[Layer]) -> Iterator[list[Inputs]]:
    """The inputs of every call of these layers' `attend`, in the order of the calls."""
    calls: list[Inputs] = []

    def record(layer: Layer, q: Tensor, k: Tensor, v: Tensor, layout: PackedLayout) -> Tensor:
        calls.append(Inputs(layer, q.detach(), k.detach(), layout))
        return type(layer).attend(layer, q, k, v, layout)

    for layer in layers:
        layer.attend = MethodType(record, layer)  # type: ignore[method-assign]
    try:
        yield calls
    finally:
        for layer in layers:
            del layer.attend


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
        o = inputs.layer.attend(q, k, values[:, None].expand_as(k).contiguous(), inputs.layout)
        parts.append(o[..., : some.shape[1]])
    return torch.cat(parts, -1)


def weights(inputs: Inputs) -> Tensor:
    """All weights of one short sequence, [N, T, T] float32."""
    return mass(inputs, torch.eye(len(inputs.k), dtype=torch.bool, device=inputs.k.device)).transpose(0, 1)
