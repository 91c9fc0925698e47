"""Position methods. `position_tables` is computed once a batch, `rotate` in every layer; biases belong to the softmax core."""

from dataclasses import replace

from torch import Tensor

from kernels.flex import document_mask
from ssscale.layout import PackedLayout
from ssscale.position.rope import apply_rope, rope_tables
from ssscale.position.scaling import scaled_base, scaled_positions
from ssscale.schema import ModelConfig, PositionMethod

Tables = tuple[Tensor, Tensor] | None


def position_tables(config: ModelConfig, layout: PackedLayout) -> Tables:
    """What every layer needs of the positions of this batch."""
    if config.position.method == PositionMethod.rope:
        return rope_tables(scaled_positions(config, layout), config.head_size, scaled_base(config, layout))
    return None


def with_block_mask(config: ModelConfig, layout: PackedLayout) -> PackedLayout:
    """The layout with FlexAttention's mask where a bias of the positions runs on a GPU: once a batch, for all layers."""
    if config.position.method in (PositionMethod.alibi, PositionMethod.fire) and layout.positions.is_cuda:
        return replace(layout, block_mask=document_mask(layout.positions, config.position.window))
    return layout


def rotate(q: Tensor, k: Tensor, tables: Tables, factor: Tensor | None) -> tuple[Tensor, Tensor]:
    """q and k with their positions in them, q times SSMax's factor [T, N] as well (in float32, rounded once)."""
    if tables is not None:
        return apply_rope(q, *tables, factor), apply_rope(k, *tables)
    if factor is not None:
        q = (q.float() * factor[..., None]).to(q.dtype)
    return q, k
