"""Reads attention weights from a layer by choosing its values.

The output is o_i = Σ_j A_ij v_j. With v_j = 1 for some keys and 0 for the others, o_i is the weight on these keys.
This works for every mixer, position bias, window and remainder, and it runs the mixer's own kernel.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import MethodType
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from ssscale.layout import PackedLayout


class Layer(Protocol):
    """`ssscale.model.decoder.Attention` or a replacement with the same `attend`."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, layout: PackedLayout) -> Tensor: ...


class Inputs(NamedTuple):
    """The inputs of a layer's mixer: q [T, N, H], rotated and scaled, k [S, K, H], and the layout."""

    layer: Layer
    q: Tensor
    k: Tensor
    layout: PackedLayout


@contextmanager
def recorded(layers: Sequence[Layer]) -> Iterator[list[Inputs]]:
    """Record the inputs of every call of the layers' `attend`, in the order of the calls."""
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
    """Return the sums of the weights over sets of keys, [T, N, sets] float32.

    keys: [S, sets] bool, the keys in each set. The weights are computed in float32 from the recorded q and k.
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
    """Return all weights of one short sequence, [N, T, T] float32."""
    return mass(inputs, torch.eye(len(inputs.k), dtype=torch.bool, device=inputs.k.device)).transpose(0, 1)
