"""Rotary positions (arXiv:2104.09864): the definition in plain torch."""

import torch
from torch import Tensor


def rotate(x: Tensor, cos: Tensor | None, sin: Tensor | None, factor: Tensor | None = None) -> Tensor:
    """(x_d cos_d − x_{d+H/2} sin_d, x_{d+H/2} cos_d + x_d sin_d) · factor for d < H/2 (the half-split form).

    x [T, N, H]; cos, sin [T, H / 2], both None for no rotation; factor [T, N], None for 1. Computes in float32
    (float64 for float64) and rounds once. Returns [T, N, H] in the dtype of x, which is x itself where there is
    nothing to do.
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
