"""The interface between the training loop and the engine, which owns memory, precision and parallelism."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from ssscale.layout import PackedLayout
from ssscale.optim.base import Optimizer


@dataclass(frozen=True)
class Fragment:
    """A piece of the training state on this rank: elements [start, start + numel) of a flattened local weight.

    name: of the weight. state: `weight` (the fp32 master weight) or one of the optimizer's `states`.
    tensor: [numel] float32, a view of the optimizer's memory. A state may have a narrower dtype.
    owned: whether this rank writes the piece to checkpoints. Other ranks may hold a copy.
    """

    name: str
    state: str
    start: int
    tensor: Tensor
    owned: bool


@dataclass(frozen=True)
class Microbatch:
    """The detached results of a forward pass.

    losses: [T] float32, in nats, or one loss per entry of `rows` if `forward_backward` got rows.
    terms: the scalars of `Decoder.terms` by name, float32.
    """

    losses: Tensor
    terms: dict[str, Tensor]


@dataclass(frozen=True)
class StepResult:
    """The result of an optimizer step.

    grad_norm: global L2 norm of the gradients before clipping. None under ZeRO stage 0, where DeepSpeed gives none.
    skipped: whether the weights were left unchanged because a gradient was NaN or Inf.
    readback: what `step` got, on the CPU.
    """

    grad_norm: float | None
    skipped: bool
    readback: Tensor


class Engine(Protocol):
    """Runs forward, backward and optimizer steps, and holds the state that they need."""

    kind: Optimizer
    terms: tuple[str, ...]  # names of `Decoder.terms`

    @property
    def module(self) -> nn.Module:
        """The model. Its weights are whole: `wait_for_weights` has been called."""

    def wait_for_weights(self) -> None:
        """Waits until the weights are whole on this rank, if the last step still exchanges them in the background.

        A forward pass waits by itself. Whatever else reads or frees the weights of the model calls this first.
        """

    def set_batch_size(self, rows: int, microbatch: int) -> None:
        """Sets the batch from the next step on. rows: rows per step over all ranks; microbatch: rows per forward pass."""

    def forward_backward(
        self, tokens: Tensor, layout: PackedLayout, labels: Tensor, divisor: int, rows: Tensor | None = None
    ) -> Microbatch:
        """Runs one microbatch and accumulates the gradient of (Σ losses + Σ weight · term) / divisor.

        tokens, labels: [T] int64 of this rank; label −100 means no target.
        divisor: the number by which the losses of the whole step are divided, usually its target tokens over all ranks.
        rows: int64 indices of the tokens with a target, if they are few. The losses are then computed for these only.
        """

    def step(self, lr: float, readback: Tensor | None = None) -> StepResult:
        """Reduces and clips the accumulated gradients, and updates the weights with the learning rate `lr`.

        readback: [n], what the host reads together with the gradient norm. A read of its own would wait for the update.
        """

    def fragments(self) -> Iterator[Fragment]:
        """Yields this rank's pieces of the training state, in the same order at every call."""

    def copies(self) -> Iterator[tuple[str, Tensor, int]]:
        """Yields (name, tensor, owner): the values of a weight that this rank's forward pass reads.

        If several nodes hold the same shard of the optimizer's state (`parallel.shard_within`), its pieces follow, with
        names such as `exp_avg of norm.weight`.
        Ranks that yield a name with the same owner must hold equal tensors. All ranks yield the same names. Weights
        that no two ranks share are left out.
        """

    def restore(self, applied_steps: int) -> None:
        """Allocates the optimizer's state as it is after `applied_steps` steps, so that `fragments` can be filled."""

    def local_shape(self, name: str) -> torch.Size:
        """Returns the shape of a weight on this tensor-parallel rank, as it is before ZeRO divides it."""
