"""The seam between the training loop and what owns memory, precision and parallelism."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from ssscale.layout import PackedLayout
from ssscale.optim.base import Optimizer


@dataclass(frozen=True)
class Fragment:
    """A piece of training state that this rank holds: elements [start, start + numel) of a flattened local weight.

    state: `weight` (the fp32 master) or one of the optimizer's `states`. tensor: a flat float32 view into the
    optimizer's memory. owned: whether this rank is the one that writes it; other ranks may hold a copy.
    """

    name: str
    state: str
    start: int
    tensor: Tensor
    owned: bool


@dataclass(frozen=True)
class Microbatch:
    """What a forward pass has given, detached. losses: [T] float32 in nats; terms: `Decoder.terms`, scalars float32."""

    losses: Tensor
    terms: dict[str, Tensor]


@dataclass(frozen=True)
class StepResult:
    """grad_norm: global L2 norm before clipping, None where DeepSpeed does not say (ZeRO stage 0)."""

    grad_norm: float | None
    skipped: bool


class Engine(Protocol):
    """Forward, backward, optimizer step and the state they keep."""

    module: nn.Module
    kind: Optimizer

    def set_batch_size(self, rows: int, microbatch: int) -> None:
        """Rows a step over all ranks from the next step on."""

    def forward_backward(
        self, tokens: Tensor, layout: PackedLayout, labels: Tensor, divisor: int, rows: Tensor | None = None
    ) -> Microbatch:
        """Forward and backward of one microbatch: the gradient of (Σ losses + Σ weighted terms) / divisor is accumulated.

        divisor: the target tokens of the whole step over all ranks, or whatever else the losses are averaged over. rows: the
        tokens that have a target, where they are few; the losses are theirs then.
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
