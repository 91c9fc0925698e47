"""Rotary position embedding, with scaling for rows longer than those of training."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, cast

from ssscale.config.registry import POSITIONS
from ssscale.errors import UserError
from ssscale.model.positions.base import Position, Rotation

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from ssscale.config.schema import ModelConfig
    from ssscale.layout import PackedLayout


class RopeScaling(StrEnum):
    """Scaling for rows longer than those of training.

    `linear` divides positions by `factor`. `ntk` increases the base according to `factor`. `dynamic_ntk` increases the
    base only for documents longer than `train_length`, depending on their length. `llama3` divides the slow frequencies
    by `factor`, as Llama 3.1 does (`llama3_frequencies`).
    """

    none = "none"
    linear = "linear"
    ntk = "ntk"
    dynamic_ntk = "dynamic_ntk"
    llama3 = "llama3"


def frequencies(head_dim: int, base: float | Tensor, device: torch.device) -> Tensor:
    """Returns θ_k = base^(−2k / H), k = 0 … H/2 − 1   (arXiv:2104.09864, Eq. 15): [H / 2] or, for a base [T, 1], [T, H / 2].

    In radians per token, float32.
    """
    import torch

    return base ** -(torch.arange(0, head_dim, 2, device=device, dtype=torch.float32) / head_dim)


def rope_tables(positions: Tensor, frequencies: Tensor) -> tuple[Tensor, Tensor]:
    """Returns cos and sin of p · θ_k: [T, H / 2] float32. positions: [T], p within each document."""
    angle = positions.float()[:, None] * frequencies
    return angle.cos(), angle.sin()


def llama3_frequencies(theta: Tensor, factor: float, low: float, high: float, train_length: int) -> Tensor:
    """Returns the frequencies of Llama 3.1 (`apply_scaling` in meta-llama/llama-models, models/llama3/model.py).

    With r = train_length · θ / 2π, the number of turns in train_length tokens: θ where r > high, θ / factor where
    r < low, and between them (1 − m) · θ / factor + m · θ with m = (r − low) / (high − low).
    """
    turns = train_length * theta / (2 * math.pi)
    kept = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return (1 - kept) * theta / factor + kept * theta


@POSITIONS.register("rope")
@dataclass(frozen=True)
class RoPE(Position):
    """Rotates q and k by the angles p · θ_k (arXiv:2104.09864). Its options are not weights and can change at
    evaluation.
    """

    exported = True

    base: float = 10_000.0  # base of the angles base^(−2k/H)
    scaling: RopeScaling = RopeScaling.none  # for rows longer than those of training (docs/guide/model.md)
    factor: float = (
        1.0  # linear: divides positions; ntk: α, dynamic_ntk: f (docs/guide/model.md); llama3: divides slow frequencies
    )
    train_length: int | None = None  # tokens; L of dynamic_ntk and llama3
    low_freq_factor: float = 1.0  # llama3: frequencies with fewer turns in train_length tokens are divided by `factor`
    high_freq_factor: float = 4.0  # llama3: frequencies with more turns in train_length tokens are kept

    def check(self, model: ModelConfig, gpu: bool) -> None:
        key, scaling = "model.position.rope", self.scaling
        for name in ("base", "factor"):
            if not getattr(self, name) > 0:
                raise UserError(f"{key}.{name} must be greater than 0, not {getattr(self, name)}")
        if self.train_length is not None and not 0 < self.train_length < 2**31:
            bound = "at least 1" if self.train_length < 1 else "less than 2^31"
            raise UserError(f"{key}.train_length must be {bound}, not {self.train_length}")
        if model.head_size % 2:
            raise UserError(
                f"rope rotates pairs, but a head has {model.head_size} dimensions: "
                "set an even model.head_dim, or model.position.method=nope"
            )
        if scaling in (RopeScaling.ntk, RopeScaling.dynamic_ntk) and model.head_size < 4:
            raise UserError(
                f"{key}.scaling={scaling.value} slows down the rotation of all pairs of dimensions but the first, and "
                f"a head of {model.head_size} dimensions has only one pair: use {key}.scaling=linear"
            )
        if scaling is RopeScaling.none and self.factor != 1.0:
            raise UserError(
                f"{key}.factor={self.factor:g} has no effect under scaling=none: set {key}.scaling=linear, ntk, dynamic_ntk "
                "or llama3"
            )
        if scaling in (RopeScaling.linear, RopeScaling.ntk, RopeScaling.llama3) and self.factor == 1.0:
            raise UserError(f"{key}.scaling={scaling.value} with factor=1 changes nothing: set {key}.factor")
        if scaling is RopeScaling.dynamic_ntk and self.train_length is None:
            raise UserError(
                f"{key}.scaling=dynamic_ntk changes only documents longer than the training length, so it must know "
                f"this length: set {key}.train_length to the row length of the training"
            )
        self._check_llama3(key)

    def _check_llama3(self, key: str) -> None:
        llama3 = self.scaling is RopeScaling.llama3
        if llama3 and self.train_length is None:
            raise UserError(
                f"{key}.scaling=llama3 needs {key}.train_length, which is original_max_position_embeddings in config.json "
                "of Llama 3.1 and later"
            )
        for name in ("low_freq_factor", "high_freq_factor"):
            if not llama3 and getattr(self, name) != getattr(RoPE, name):
                raise UserError(f"{key}.{name}={getattr(self, name):g} has no effect without {key}.scaling=llama3")
        if not 0 < self.low_freq_factor < self.high_freq_factor:
            raise UserError(
                f"{key}.low_freq_factor={self.low_freq_factor:g} must be above 0 and below "
                f"{key}.high_freq_factor={self.high_freq_factor:g}"
            )

    @property
    def depends_on_length(self) -> bool:
        return self.scaling is RopeScaling.dynamic_ntk

    def rotation(self, head_size: int, layout: PackedLayout) -> Rotation:
        linear = self.scaling is RopeScaling.linear
        positions = layout.positions / self.factor if linear else layout.positions
        theta = frequencies(head_size, self.scaled_base(head_size, layout), positions.device)
        if self.scaling is RopeScaling.llama3:
            theta = llama3_frequencies(
                theta, self.factor, self.low_freq_factor, self.high_freq_factor, cast(int, self.train_length)
            )
        return rope_tables(positions, theta)

    def scaled_base(self, head_size: int, layout: PackedLayout) -> float | Tensor:
        """Returns the base that `frequencies` takes: a number or, for dynamic_ntk, a tensor [T, 1] in float32.

        linear, llama3: the base is unchanged; positions or frequencies are divided instead (arXiv:2306.15595).
        ntk: base' = base · α^(H / (H − 2)) with α = factor, so that the slowest pair rotates α times slower.
        dynamic_ntk: α = f · S / L − (f − 1) with f = factor for documents longer than the training length L, otherwise
        1. S is the length of each document. For a document that grows in a cache, S is its final length from the first
        token on, because cached keys for one base cannot be combined with keys for another.

        Raises ValueError if dynamic_ntk has no train_length.
        """
        import torch

        if self.scaling not in (RopeScaling.ntk, RopeScaling.dynamic_ntk):
            return self.base
        power = head_size / (head_size - 2)
        if self.scaling is RopeScaling.ntk:
            return self.base * self.factor**power
        if self.train_length is None:
            raise ValueError("scaling=dynamic_ntk needs the training length: set model.position.rope.train_length")
        counts = layout.cu_seqlens.diff()
        final = counts if layout.final_lengths is None else layout.final_lengths
        lengths = torch.repeat_interleave(final, counts, output_size=len(layout.positions)).double()
        excess = (lengths / self.train_length).clamp(min=1.0) - 1
        # In float64, because torch's float32 power may round the same number differently at another place of the
        # vector.
        return (self.base * (self.factor * excess[:, None] + 1) ** power).float()

    def table_bytes(self, head_size: int, length: int) -> int:
        return 8 * length * head_size
