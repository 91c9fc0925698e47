"""Rotary positions, the definition in plain torch."""

import torch
from torch import Tensor


def rotate(x: Tensor, cos: Tensor | None, sin: Tensor | None, factor: Tensor | None = None) -> Tensor:
    """Rotate the pairs (x_k, x_{k + H/2}) (the half-split form), times `factor`, in float32, rounded once.

    x: [T, N, H]; cos, sin: [T, H / 2], None for no rotation; factor: [T, N]. Returns [T, N, H] in x.dtype.
    """
    if cos is None and factor is None:
        return x
    wide = x if x.dtype == torch.float64 else x.float()
    if cos is not None and sin is not None:
        first, second = wide.chunk(2, -1)
        cos, sin = cos[:, None], sin[:, None]
        wide = torch.cat((first * cos - second * sin, second * cos + first * sin), -1)
    if factor is not None:
        wide = wide * factor[..., None]
    return wide.to(x.dtype)
