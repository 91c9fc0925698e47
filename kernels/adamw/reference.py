"""The definition of the update in plain torch."""

from collections.abc import Sequence

import torch
from torch import Tensor

from .settings import Settings, constants


def summed(parts: Sequence[Tensor]) -> Tensor:
    """Returns the gradient of a segment, the sum of its parts in float32 in their order: ((p₀ + p₁) + p₂) + …

    parts: [n] each, float32 or bfloat16.
    """
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part.float()
    return total


def adamw_reference(
    master: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    gradient: Tensor,
    settings: Settings,
    factor: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns (master, exp_avg, exp_avg_sq) after a step of AdamW (arXiv:1711.05101, Algorithm 2).

    g = factor · gradient
    m ← β₁ m + (1 − β₁) g        v ← β₂ v + (1 − β₂) g²
    w ← w − lr · weight_decay · w − lr / (1 − β₁ᵗ) · m / (√v / √(1 − β₂ᵗ) + ε)

    master, exp_avg, exp_avg_sq [n], all float32 or all float64; gradient [n] of any dtype; factor [] of any dtype, NaN for
    "change nothing". In float32, the arithmetic is that of the kernel: the decay, m, v and the addition of ε are
    computed in float64 and rounded to float32, and all other operations are float32.
    """
    if factor.isnan():
        return master.clone(), exp_avg.clone(), exp_avg_sq.clone()
    dtype = master.dtype
    decay, beta1, beta2, eps, step_size, correction = constants(settings, rounded=dtype == torch.float32)
    g = (gradient.to(dtype) * factor.to(dtype)).double()
    w = (master.double() - decay * master.double()).to(dtype)
    m = (beta1 * exp_avg.double() + (1 - beta1) * g).to(dtype)
    v = (beta2 * exp_avg_sq.double() + (1 - beta2) * g * g).to(dtype)
    root = v.double().sqrt().to(dtype)  # torch's float32 square root on CPUs is off by one in the last place
    # On a GPU, torch divides by a Python number by multiplying with its reciprocal, which is off in the last place.
    denominator = ((root / root.new_full((), correction)).double() + eps).to(dtype)
    return w - step_size * m / denominator, m, v
