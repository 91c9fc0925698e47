"""Position methods. `position_tables` is computed once a batch, `rotate` in every layer; biases belong to the softmax core."""

from dataclasses import replace
from typing import NamedTuple

from torch import Tensor

from kernels.flex import document_mask
from kernels.ssmax import rotate as rotate_heads
from ssscale.config.schema import ModelConfig, PositionMethod
from ssscale.layout import PackedLayout
from ssscale.position.rope import rope_tables
from ssscale.position.scaling import scaled_base, scaled_positions


class Tables(NamedTuple):
    """What every layer needs of the positions of a batch.

    cos, sin: [T, H / 2] float32 of the rotary angles. base: [T] float32, what SSMax's s multiplies: ln n or p_n.
    """

    cos: Tensor | None = None
    sin: Tensor | None = None
    base: Tensor | None = None


def position_tables(config: ModelConfig, layout: PackedLayout) -> Tables:
    """The tables of a batch, without SSMax's."""
    if config.position.method == PositionMethod.rope:
        return Tables(*rope_tables(scaled_positions(config, layout), config.head_size, scaled_base(config, layout)))
    return Tables()


def with_block_mask(config: ModelConfig, layout: PackedLayout) -> PackedLayout:
    """The layout with FlexAttention's mask where a bias of the positions runs on a GPU: once a batch, for all layers."""
    if config.position.method in (PositionMethod.alibi, PositionMethod.fire) and layout.positions.is_cuda:
        return replace(layout, block_mask=document_mask(layout.positions, config.position.window))
    return layout


def rotate(q: Tensor, k: Tensor, tables: Tables, factor: Tensor | None) -> tuple[Tensor, Tensor]:
    """q and k with their positions in them, q times SSMax's factor [T, N] as well (in float32, rounded once)."""
    return rotate_heads(q, tables.cos, tables.sin, factor), rotate_heads(k, tables.cos, tables.sin)
