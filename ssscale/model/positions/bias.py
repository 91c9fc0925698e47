"""The base class of position methods that bias the logits. On a GPU they run in FlexAttention."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from ssscale.errors import UserError
from ssscale.model.positions.base import Position

if TYPE_CHECKING:
    from ssscale.config.schema import ModelConfig
    from ssscale.layout import PackedLayout


@dataclass(frozen=True)
class BiasPosition(Position):
    """softmax(q·k / √H + bias(i, j))"""

    adds_bias = True
    hidden: ClassVar[int] = 1  # numbers that the exported model holds per pair of positions

    def check(self, model: ModelConfig, gpu: bool) -> None:
        if gpu and model.head_size < 16:
            raise UserError(
                f"model.position.method={self.name} runs in FlexAttention on a GPU, which takes no heads of "
                f"{model.head_size} dimensions: use at least 16"
            )

    def refuses_context(self) -> str | None:
        return (
            f"model.position.method={self.name} is a bias that every rank would need of all tokens: set "
            "parallel.ulysses=1 and parallel.ring=1"
        )

    def lay_out(self, layout: PackedLayout, window: int | None) -> PackedLayout:
        from ssscale_kernels.flex import document_mask

        return (
            replace(layout, block_mask=document_mask(layout.positions, window)) if layout.positions.is_cuda else layout
        )
