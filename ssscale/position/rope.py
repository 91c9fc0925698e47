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
