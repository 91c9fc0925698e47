"""What a position method declares: how a model tells one place in a document from another.

A method is a frozen dataclass whose fields are its options, `model.position.NAME.OPTION`, registered under its name. It
turns q and k (`rotation`) or adds to their products (`bias`). Its file imports torch only where it computes.
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
    """What is added to the logits of queries at positions i [..., Q] and keys at j [..., S], j ≤ i: [..., N, Q, S]."""

    def __call__(self, i: Tensor, j: Tensor) -> Tensor: ...

    def attend(self, q: Tensor, k: Tensor, v: Tensor, layout: PackedLayout, scale: float | None) -> Tensor:
        """Softmax attention with this bias by FlexAttention, for a layout that has a block mask."""


@dataclass(frozen=True)
class Position:
    """Defaults: neither rotates nor biases, learns nothing, keeps nothing. `name` is filled in by the registration."""

    name: ClassVar[str]
    adds_bias: ClassVar[bool] = False  # to the logits; for the mixers that add biases
    exported: ClassVar[bool] = False  # whether ssscale/hf's model has it

    def check(self, model: ModelConfig, gpu: bool) -> None:
        """Raise UserError where the options do not go together."""

    def refuses_context(self) -> str | None:
        """Why the method does not run under context parallelism; None: it does."""
        return None

    @property
    def depends_on_length(self) -> bool:
        """Whether a token's rotation depends on how long its document is in the end, so that no prefix can be shared."""
        return False

    def weights(self, model: ModelConfig) -> dict[str, Weight]:
        """What each layer learns."""
        return {}

    def rotation(self, head_size: int, layout: PackedLayout) -> Rotation | None:
        """cos and sin [T, H / 2] float32 by which q and k are turned in every layer; computed once a batch."""
        return None

    def lay_out(self, layout: PackedLayout, window: int | None) -> PackedLayout:
        """The layout with what all layers need besides; called once a batch."""
        return layout

    def bias(self, layer: Attention) -> Bias | None:
        return None

    def table_bytes(self, head_size: int, length: int) -> int:
        """Of what `rotation` makes of one row."""
        return 0

    def kept_bytes(self, heads: float, length: int) -> float:
        """At the peak of a training step besides what the mixer keeps, for `heads` heads of a rank."""
        return 0.0
