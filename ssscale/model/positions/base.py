"""The base class of position methods, which tell a model where a token is in its document.

A position method is a frozen dataclass that is registered under its name. Its fields are its options,
`model.position.NAME.OPTION`. It rotates q and k (`rotation`) or adds a bias to their products (`bias`). Its file
imports torch only inside functions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Protocol

from ssscale.model.weight import Weight

if TYPE_CHECKING:
    from torch import Tensor

    from ssscale.config.schema import ModelConfig
    from ssscale.layout import PackedLayout
    from ssscale.model.decoder import Attention

Rotation = tuple["Tensor", "Tensor"]


class Bias(Protocol):
    """A bias of the logits. Maps query positions i [..., Q] and key positions j [..., S], j ≤ i, to [..., N, Q, S]."""

    def __call__(self, i: Tensor, j: Tensor) -> Tensor: ...

    def narrow(self, first: int, count: int) -> Bias:
        """Returns the bias of `count` of the heads, which a Ulysses rank attends with."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, layout: PackedLayout, scale: float | None) -> Tensor:
        """Computes softmax attention with this bias in FlexAttention. Requires `layout.block_mask`."""


@dataclass(frozen=True)
class Position:
    """By default a method neither rotates nor biases, and learns nothing. The registration sets `name`."""

    name: ClassVar[str]
    adds_bias: ClassVar[bool] = False  # it adds a bias to the logits; only mixers that support biases take it
    varies: ClassVar[str | None] = None  # what differs from run to run on a GPU; None: nothing
    exported: ClassVar[bool] = False  # exported models support it (ssscale/hf)

    def check(self, model: ModelConfig, gpu: bool) -> None:
        """Raises UserError if the options contradict each other or the model. gpu: whether the run uses a GPU."""

    def refuses_ring(self) -> str | None:
        """Returns why the method does not run in a ring, and what to set instead, or None if it runs."""
        return None

    @property
    def depends_on_length(self) -> bool:
        """Whether rotations depend on a document's final length, so that documents cannot share a cached prefix."""
        return False

    def weights(self, model: ModelConfig) -> dict[str, Weight]:
        """The weights of each layer."""
        return {}

    def rotation(self, head_size: int, layout: PackedLayout) -> Rotation | None:
        """Returns cos and sin [T, H / 2] float32 for the rotation of q and k in all layers. Called once per batch."""
        return None

    def lay_out(self, layout: PackedLayout, window: int | None) -> PackedLayout:
        """Returns the layout with additions that all layers need. Called once per batch."""
        return layout

    def bias(self, layer: Attention) -> Bias | None:
        """Returns the bias that this layer adds to the logits, for this rank's heads; None if the method has none."""
        return None

    def table_bytes(self, head_size: int, length: int) -> int:
        """Bytes of the tables that `rotation` returns for one row of `length` tokens."""
        return 0

    def kept_bytes(self, heads: float, length: int) -> float:
        """Bytes at the peak of a training step in addition to `Mixer.kept_bytes`. heads: query heads of a rank."""
        return 0.0
