"""How far an update may be from float64 by rounding alone. Derived in README.md, "Rounding errors"."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from .reference import adamw_reference
from .settings import Settings

UNIT = 2.0**-24  # the largest relative error of rounding to float32
POWER = 8  # of powf on GPUs, in UNIT: CUDA's guide allows 4 units in the last place
SECOND_ORDER = 1 + 1e-4  # products of errors, which the bounds leave out

State = tuple[Tensor, Tensor, Tensor]  # master, exp_avg, exp_avg_sq


def exact_and_bounds(
    state: Sequence[Tensor], gradient: Tensor, settings: Settings, factor: Tensor, single: bool = False
) -> tuple[State, State]:
    """Returns (exact, bounds): the state after the update in float64, and the largest possible rounding error of each element.

    state: [n] float32 each, before the update; gradient [n] of any dtype; factor [] float32.
    single: whether the settings are float32 as well, and every operation, as in torch's fused AdamW on GPUs; if not, the
        operations are those of `adamw_reference` in float32.
    Results below 2^-126, which have fewer digits, are not covered.
    """
    w, m, v = (x.double() for x in state)
    g = (gradient.double() * factor.double()).abs()
    lr, beta1, beta2, eps, weight_decay, step = settings
    exact = adamw_reference(w, m, v, gradient, settings, factor.double())
    new_w, new_m, new_v = exact
    rest1, rest2, decay = 1 - beta1, 1 - beta2, lr * weight_decay
    power1, power2 = beta1**step, beta2**step
    if single:
        off_m = UNIT * (new_m.abs() + 2 * beta1 * m.abs() + (beta1 + 3 * rest1) * g)
        off_v = UNIT * (new_v + 2 * beta2 * v + (beta2 + 5 * rest2) * g * g)
        correction1 = power1 * (step + POWER) / (1 - power1) + 1
        correction2 = power2 * (step + POWER) / (1 - power2) + 1
        relative = UNIT * (correction1 + correction2 / 2 + 9)
        decayed = UNIT * (2 + 3 * decay) * w.abs()  # w · (1 − lr · weight_decay), or w − (lr · weight_decay) · w
    else:
        off_m = UNIT * (new_m.abs() + rest1 * g)
        off_v = UNIT * (new_v + 2 * rest2 * g * g)
        relative, decayed = UNIT * 8, UNIT * w.abs()
    root = new_v.sqrt() / math.sqrt(1 - power2)
    relative = relative + off_v / (2 * new_v.clamp(min=torch.finfo(torch.float64).tiny))
    scale = lr / (1 - power1) / (root + eps)
    off_w = UNIT * new_w.abs() + decayed + scale * (off_m + relative * new_m.abs())
    return exact, (SECOND_ORDER * off_w, SECOND_ORDER * off_m, SECOND_ORDER * off_v)


def share_of_bounds(found: Sequence[Tensor], exact: State, bounds: State) -> float:
    """The largest error in units of its bound: 1 or less if nothing but rounding is wrong; Inf for NaN and Inf."""
    shares = [
        float(((f.double() - e).abs() / b.clamp(min=2.0**-149)).max())
        for f, e, b in zip(found, exact, bounds, strict=True)
    ]
    return max(x if math.isfinite(x) else math.inf for x in shares)
