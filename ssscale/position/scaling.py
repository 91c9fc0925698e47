"""Rotary positions beyond the training length. Nothing here is a weight: all of it can change at evaluation."""

import torch
from torch import Tensor

from ssscale.config.schema import ModelConfig, RopeScaling
from ssscale.layout import PackedLayout


def scaled_base(config: ModelConfig, layout: PackedLayout) -> float | Tensor:
    """RoPE's base under the configured scaling.

    linear: as it is (positions are divided instead).
    ntk: base' = base · α^(H / (H − 2)) with α = rope_factor, so that the slowest pair turns α times slower.
    dynamic_ntk: α = f · S / L − (f − 1) with f = rope_factor, for documents of a length S beyond the training length L, else
    1; [T, 1] float32, as S is each document's own. A document that grows in a cache has the length that it is to reach from
    its first token on: what was computed for another base could not be told from what was not.

    Raises ValueError where dynamic_ntk has no training length.
    """
    position = config.position
    if position.rope_scaling not in (RopeScaling.ntk, RopeScaling.dynamic_ntk):
        return position.rope_base
    power = config.head_size / (config.head_size - 2)
    if position.rope_scaling == RopeScaling.ntk:
        return position.rope_base * position.rope_factor**power
    if position.train_length is None:
        raise ValueError("rope_scaling=dynamic_ntk needs the training length: set model.position.train_length")
    counts = layout.cu_seqlens.diff()
    final = counts if layout.final_lengths is None else layout.final_lengths
    lengths = torch.repeat_interleave(final, counts, output_size=len(layout.positions)).double()
    excess = (lengths / position.train_length).clamp(min=1.0) - 1
    # float64: a power in float32 depends on where in a vector it is computed.
    return (position.rope_base * (position.rope_factor * excess[:, None] + 1) ** power).float()


def scaled_positions(config: ModelConfig, layout: PackedLayout) -> Tensor:
    """The positions that RoPE turns by: divided by rope_factor under linear scaling (arXiv:2306.15595)."""
    linear = config.position.rope_scaling == RopeScaling.linear
    return layout.positions / config.position.rope_factor if linear else layout.positions
