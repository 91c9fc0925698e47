"""Position methods of an exported model. This file is saved with the weights and needs only torch.

i: [B, T] and j: [B, S] are the positions of queries and keys in their documents.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

FIRE_HIDDEN, FIRE_LENGTH, FIRE_EPS = 32, 512.0, 1e-6


def rope_tables(rope: dict[str, Any], size: int, positions: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    """Returns cos and sin of p · base^(−2k / H)   (arXiv:2104.09864, Eq. 15), after scaling: [B, T, H / 2]

    rope: the options of the method. size: H. positions: [B, T]. lengths: [B, 1] or [B, T] float64, the final number of
    tokens of each token's document, which only dynamic_ntk needs.
    """
    scaling, factor, base = rope["scaling"], rope["factor"], rope["base"]
    p = positions.float()
    if scaling == "linear":
        p = p / factor
    elif scaling == "ntk":
        base = base * factor ** (size / (size - 2))
    elif scaling == "dynamic_ntk":
        excess = (lengths / rope["train_length"]).clamp(min=1.0) - 1
        base = (base * (factor * excess + 1) ** (size / (size - 2))).float()[..., None]
    theta = base ** -(torch.arange(0, size, 2, device=p.device, dtype=torch.float32) / size)
    if scaling == "llama3":  # frequencies of few turns in train_length tokens are divided by the factor
        low, high = rope["low_freq_factor"], rope["high_freq_factor"]
        kept = ((rope["train_length"] * theta / (2 * math.pi) - low) / (high - low)).clamp(0.0, 1.0)
        theta = (1 - kept) * theta / factor + kept * theta
    angle = p[..., None] * theta
    return angle.cos(), angle.sin()


def rotate(x: Tensor, tables: tuple[Tensor, Tensor] | None, factor: Tensor | None = None) -> Tensor:
    """Rotates x [B, N, T, H] (halves are pairs) and multiplies it by `factor` in float32; rounds once."""
    if tables is None and factor is None:
        return x
    y = x.float()
    if tables is not None:
        cos, sin = tables[0][:, None], tables[1][:, None]
        a, b = y.chunk(2, -1)
        y = torch.cat((a * cos - b * sin, b * cos + a * sin), -1)
    return (y if factor is None else y * factor).to(x.dtype)


class ALiBi:
    """bias = −m_h · (i − j)   (arXiv:2108.12409, Eq. 1), m_h = 2^(−8h / N); Section 3 if N is not a power of two."""

    inner = 1  # numbers per pair of positions

    def __init__(self, num_heads: int, learned: nn.Module) -> None:
        self.num_heads = num_heads

    def __call__(self, i: Tensor, j: Tensor) -> Tensor:
        """i: [B, Q], j: [B, S] → [B, N, Q, S] float32"""
        power = 1 << (self.num_heads.bit_length() - 1)
        head = torch.arange(self.num_heads, device=i.device, dtype=torch.float32)
        slopes = torch.exp2(-8 / power * torch.where(head < power, head + 1, head - power + 0.5))
        return -slopes[:, None, None] * (i[:, :, None] - j[:, None, :]).float()[:, None]


class FIRE:
    """MLP(ψ(i − j) / ψ(max(i, |L_mult · L0|))), ψ(x) = ln(|c| · x + 1)   (arXiv:2310.04418, Eqs. 6 and 16)"""

    inner = FIRE_HIDDEN

    def __init__(self, num_heads: int, learned: nn.Module) -> None:
        self.learned = learned

    def __call__(self, i: Tensor, j: Tensor) -> Tensor:
        """i: [B, Q], j: [B, S] → [B, N, Q, S] float32"""
        names = ("c", "length_multiplier", "w1", "b1", "w2", "b2")
        c, multiplier, w1, b1, w2, b2 = (self.learned(name).float() for name in names)
        threshold = (multiplier * FIRE_LENGTH).abs()
        norm = ((c * torch.maximum(i.float(), threshold)).abs() + 1).log() + FIRE_EPS
        x = ((c * (i[:, :, None] - j[:, None, :])).abs() + 1).log() / norm[..., None]
        hidden = (x[..., None] * w1[:, 0] + b1).relu()
        return (hidden @ w2.T + b2).movedim(-1, 1)


BIASES: dict[str, Callable[..., Any]] = {"alibi": ALiBi, "fire": FIRE}
