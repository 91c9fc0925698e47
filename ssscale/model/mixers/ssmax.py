"""Scalable-Softmax (SSMax), arXiv:2501.19399."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING

from ssscale.config.registry import MIXERS
from ssscale.errors import UserError
from ssscale.model.mixers.base import Export, Sizes, Tables
from ssscale.model.mixers.softmax import Factor, Softmax, mix_softmax, softmax_tile
from ssscale.model.weight import Weight

if TYPE_CHECKING:
    from torch import Tensor

    from ssscale.config.schema import ModelConfig
    from ssscale.hf.modeling_ssscale import Attention as ExportedAttention
    from ssscale.hf.modeling_ssscale import Batch, SSScaleForCausalLM
    from ssscale.layout import PackedLayout
    from ssscale.model.decoder import Attention, Weights


class Variant(StrEnum):
    """`learned`: s per head (Eq. 2). `fixed`: constant s. `bias`: with b (Eq. 4).

    `pn`: with b, and with p_n instead of ln n (Eq. 3).
    """

    learned = "learned"
    fixed = "fixed"
    bias = "bias"
    pn = "pn"


def ssmax_base(batch: Batch, model: SSScaleForCausalLM) -> Tensor:
    """Returns ln n of each token, or p_n under the variant `pn`: [B, T] float32.

    Under `pn`, tokens with an n beyond the training length get the last p_n.
    """
    window = model.config.position["window"]
    n = batch.i + 1 if window is None else (batch.i + 1).clamp(max=window)
    pn = model.shared["ssmax"].pn if "ssmax" in model.shared else None
    return n.float().log() if pn is None else pn.float()[n.clamp(max=pn.numel()) - 1]


def ssmax_factor(batch: Batch, layer: ExportedAttention) -> Tensor:
    """Returns the factor by which q is multiplied (s ln n + b, or s p_n + b): [B, N, T, 1] float32   (Eqs. 2 to 4)"""
    s, b = layer.learned("s"), layer.learned("b")
    s = layer.options["scale"] if s is None else s.float()[:, None]
    factor = s * batch.own["ssmax"][:, None, :].expand(-1, layer.sizes[0], -1)
    return (factor if b is None else factor + b.float()[:, None])[..., None]


@MIXERS.register("ssmax")
@dataclass(frozen=True)
class SSMax(Softmax):
    """a_j = n^(s z_j) / Σ_m n^(s z_m) = softmax((s ln n) z)_j   (Eq. 2)

    a_j is the weight of key j, and z the logits of one query. n is the number of keys that the query attends to, its own
    included. With a window, n is at most `window`. s is learned per layer and head, or fixed. The variant `bias` replaces
    s ln n by s ln n + b (Eq. 4). `pn` replaces it by s p_n + b, where all layers and heads share the learned parameters p_n
    (Eq. 3). Instead of the logits, q is multiplied by this factor, so the kernels of softmax attention are used without
    changes.
    """

    positions = ("rope", "nope")
    positions_reason = "SSMax scales q, so a bias that is added to q·k afterwards would not be scaled"
    begins_from = "softmax"
    export = Export(mix_softmax, helpers=(softmax_tile,), factor=ssmax_factor, prepare=ssmax_base)

    variant: Variant = Variant.learned  # learned: s ln n; fixed: s is constant; bias: s ln n + b; pn: s p_n + b
    scale: float = 1.0  # initial s; `fixed`: the constant s. A stage that changes it replaces the trained s
    bias: float = 0.0  # initial b. A stage that changes it replaces the trained b

    def check(self, model: ModelConfig) -> None:
        if self.scale <= 0:
            raise UserError(f"model.mixer.{self.name}.scale must be greater than 0, not {self.scale}")
        if self.variant in (Variant.learned, Variant.fixed) and self.bias:
            raise UserError(
                f"model.mixer.{self.name}.bias={self.bias:g} has no effect under variant={self.variant.value}: "
                f"set model.mixer.{self.name}.variant=bias"
            )

    def weights(self, model: ModelConfig) -> dict[str, Weight]:
        found = {}
        if self.variant is not Variant.fixed:
            found["s"] = Weight((model.num_heads,), start=self.scale, split=0)
        if self.variant in (Variant.bias, Variant.pn):
            found["b"] = Weight((model.num_heads,), start=self.bias, split=0)
        return found

    def shared_weights(self, model: ModelConfig, length: int) -> dict[str, Weight]:
        return {"pn": Weight((length,), start=1.0)} if self.variant is Variant.pn else {}

    def kept_bytes(self, sizes: Sizes) -> float:
        """Returns the bytes kept for the backward pass.

        They include copies of q and k, as for softmax with RoPE: the operator that scales q also applies RoPE, and it copies
        q and k even without RoPE. Under context parallelism, q in fp32 and the factor of q are kept as well.
        """
        kept = super().kept_bytes(replace(sizes, rotated=True))
        shared = sizes.ulysses * sizes.ring > 1
        return kept + (4 * sizes.q + 4 * sizes.heads if shared else 0.0)

    def begun(self, model: ModelConfig, length: int) -> SSMax:
        """Returns a copy whose `scale` and `bias` are the values at which s and b start when a softmax model is converted.

        b = 0, and s = 1 / mean(ln n), so that the factor of q is 1 on average (arXiv:2501.19399, Section 2.1 (e)). The
        mean is over the tokens of a row that is one document: n = 1 … length, and at most W with a window of W keys.
        Under `pn`, s = 1, because p_n starts at 1.
        """
        window = min(model.position.window or length, length)
        total = math.lgamma(window + 1) + (length - window) * math.log(window)
        scale = 1.0 if self.variant is Variant.pn or total == 0 else length / total
        return replace(self, scale=scale, bias=0.0)

    def prepare(self, layout: PackedLayout, window: int | None, shared: Weights | None) -> Tensor:
        """Returns ln n of each token (Eq. 2), or p_n (Eq. 3): [T] float32. Beyond the training length it is the last p_n."""
        n = layout.num_visible_keys(window)
        if shared is None:
            return n.float().log()  # bf16 would round ln 1000 and ln 1010 to the same value
        pn = shared.take("pn")
        return pn.float()[(n.clamp(max=pn.numel()) - 1).long()]

    def factor_parameters(self, layer: Attention, tables: Tables) -> Factor:
        weights, base = layer.weights, tables.own
        s = weights.take("s") if "s" in weights else base.new_full((layer.heads,), self.scale)
        return base, s, weights.take("b") if "b" in weights else None

    def query_factor(self, layer: Attention, tables: Tables) -> Tensor:
        from ssscale_kernels.ssmax import query_factor

        return query_factor(*self.factor_parameters(layer, tables))

    def observed_weights(self, layer: Attention) -> dict[str, Tensor]:
        return {"ssmax_s": layer.weights.take("s")} if "s" in layer.weights else {}
