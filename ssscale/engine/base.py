"""The seam between the training loop and what owns memory, precision and parallelism."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from ssscale.layout import PackedLayout


@dataclass(frozen=True)
class Fragment:
    """A piece of training state that this rank holds: elements [start, start + numel) of a flattened local weight.

    state: `weight` (the fp32 master), `exp_avg` or `exp_avg_sq`. tensor: a flat float32 view into the optimizer's memory.
    owned: whether this rank is the one that writes it; other ranks may hold a copy.
    """

    name: str
    state: str
    start: int
    tensor: Tensor
    owned: bool


@dataclass(frozen=True)
class StepResult:
    """grad_norm: global L2 norm before clipping, None where DeepSpeed does not say (ZeRO stage 0)."""

    grad_norm: float | None
    skipped: bool


class Engine(Protocol):
    """Forward, backward, optimizer step and the state they keep."""

    module: nn.Module
    mark: Callable[[str], None]  # called with the name of each phase as it begins

    def set_batch_size(self, rows: int, microbatch: int) -> None:
        """Rows a step over all ranks from the next step on."""

    def forward_backward(
        self, tokens: Tensor, layout: PackedLayout, labels: Tensor, num_targets: int, rows: Tensor | None = None
    ) -> Tensor:
        """Losses [T] of one microbatch, its gradient accumulated; num_targets counts the whole step's, over all ranks.

        rows: the tokens that have a target, where they are few; the losses are theirs then.
        """

    def step(self, lr: float) -> StepResult:
        """Reduce, clip and apply what was accumulated."""

    def fragments(self) -> Iterator[Fragment]:
        """This rank's pieces of the training state, in the same order at every call."""

    def copies(self) -> Iterator[tuple[str, Tensor, int]]:
        """(name, what this rank holds of a weight as forward reads it, owner): ranks with the same owner hold the same.

        The same names on all ranks; weights of which no other rank holds anything are left out.
        """

    def restore(self, applied_steps: int) -> None:
        """Make room for the optimizer's state as it is after so many steps, so that `fragments` can be filled."""

    def local_shape(self, name: str) -> torch.Size:
        """The shape of this tensor-parallel rank's part of a weight, whatever ZeRO has done to it."""
