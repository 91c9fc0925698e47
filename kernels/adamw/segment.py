"""A piece of the training state that one update reads and writes."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor


@dataclass(frozen=True)
class Segment:
    """A contiguous piece of a weight with its optimizer state.

    master, exp_avg, exp_avg_sq: [n] float32; rounded: [n] bfloat16, which an update makes equal to master, rounded.
    group: index of its settings. counted: whether the norm counts its gradient. Ranks that hold copies of a weight count it
    once.
    """

    TENSORS: ClassVar = ("master", "exp_avg", "exp_avg_sq", "rounded")

    master: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    rounded: Tensor
    group: int = 0
    counted: bool = True

    def __post_init__(self) -> None:
        for name in self.TENSORS:
            tensor = getattr(self, name)
            dtype = torch.bfloat16 if name == "rounded" else torch.float32
            if tensor.dtype != dtype:
                raise ValueError(f"{name} must be {dtype}, not {tensor.dtype}")
            check_flat(name, tensor, self.master)


def check_flat(name: str, tensor: Tensor, master: Tensor) -> None:
    """Raises ValueError unless `tensor` is contiguous, has one dimension, and the size and device of `master`."""
    if tensor.dim() != 1 or not tensor.is_contiguous():
        raise ValueError(f"{name} must be contiguous with one dimension, not {list(tensor.shape)}")
    if tensor.shape != master.shape or tensor.device != master.device:
        raise ValueError(
            f"{name} has {tensor.numel()} elements on {tensor.device}, and master {master.numel()} on {master.device}"
        )
