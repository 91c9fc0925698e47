"""The base class of position methods that bias the logits. On a GPU they run in FlexAttention."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ssscale.errors import UserError
from ssscale.model.positions.base import Position

if TYPE_CHECKING:
    from ssscale.config.schema import ModelConfig
    from ssscale.layout import PackedLayout


@dataclass(frozen=True)
class BiasPosition(Position):
    """softmax(q·k / √H + bias(i, j))"""

    adds_bias = True

    def check(self, model: ModelConfig, gpu: bool) -> None:
        if gpu and model.head_size < 16:
            raise UserError(
                f"model.position.method={self.name} runs in FlexAttention on a GPU, which takes no heads of "
                f"{model.head_size} dimensions: use at least 16"
            )

    def refuses_ring(self) -> str | None:
        return (
            f"model.position.method={self.name} adds a bias to the logits, which the ring's kernels do not: use "
            "parallel.ulysses instead of parallel.ring"
        )

    def lay_out(self, layout: PackedLayout, window: int | None) -> PackedLayout:
        from ssscale_kernels.flex import document_mask

        if not layout.positions.is_cuda:
            return layout
        if layout.gathered is not None:  # these are the tokens that attention sees
            whole = self.lay_out(layout.gathered.layout, window)
            return replace(layout, gathered=replace(layout.gathered, layout=whole))
        return replace(layout, block_mask=document_mask(layout.positions, window))
