"""Rotary position embedding."""

import torch
from torch import Tensor


def rope_tables(positions: Tensor, head_dim: int, base: float) -> tuple[Tensor, Tensor]:
    """cos and sin of p · θ_k, θ_k = base^(−2k / H), k = 0 … H/2 − 1   (arXiv:2104.09864, Eq. 15)

    positions: [T], within their documents. Returns two [T, H / 2] float32.
    """
    exponent = torch.arange(0, head_dim, 2, device=positions.device, dtype=torch.float32) / head_dim
    angle = positions.float()[:, None] * base**-exponent
    return angle.cos(), angle.sin()


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor, factor: Tensor | None = None) -> Tensor:
    """Rotate the pairs (x_k, x_{k + H/2}) (the half-split form), times `factor`, in float32, rounded once.

    x: [T, N, H]; cos, sin: [T, H / 2]; factor: [T, N]. Returns [T, N, H] in x.dtype.
    """
    first, second = x.float().chunk(2, -1)
    cos, sin = cos[:, None], sin[:, None]
    rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), -1)
    if factor is not None:
        rotated = rotated * factor[..., None]
    return rotated.to(x.dtype)
