"""What an update of one group of weights depends on besides its tensors, and the constants that follow from it."""

import math
import struct
from typing import NamedTuple


class Settings(NamedTuple):
    """The settings of a group of weights for one step. step: how many updates there will have been after it, from 1."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    step: int


class Constants(NamedTuple):
    """What the kernel reads, as float64, in this order."""

    decay: float  # lr · weight_decay
    beta1: float
    beta2: float
    eps: float
    step_size: float  # lr / (1 − β₁ᵗ)
    correction: float  # √(1 − β₂ᵗ)


def constants(settings: Settings, rounded: bool = True) -> Constants:
    """rounded: whether the bias corrections are rounded to float32, as torch's fused AdamW does, which divides by them."""
    lr, beta1, beta2, eps, weight_decay, step = settings
    keep = _float32 if rounded else float
    step_size = keep(lr / keep(1 - beta1**step))
    return Constants(lr * weight_decay, beta1, beta2, eps, step_size, keep(math.sqrt(1 - beta2**step)))


def _float32(x: float) -> float:
    found: float = struct.unpack("f", struct.pack("f", x))[0]
    return found
