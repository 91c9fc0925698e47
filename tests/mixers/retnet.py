"""Retention (arXiv:2307.08621, Eq. 5) as a mixer in one file: o_i = Σ_{j ≤ i} γ^(i − j) (q_i·k_j / sqrt(H)) v_j.

γ = exp(−rate) is learned for each head. SSSCALE_PLUGINS names this file; nothing else knows of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from ssscale.config.registry import MIXERS
from ssscale.model.mixers.base import Export, Mixer, Sizes
from ssscale.model.weight import Weight

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from ssscale.config.schema import ModelConfig
    from ssscale.hf.modeling_ssscale import Attention as ExportedAttention
    from ssscale.hf.modeling_ssscale import Batch, attend_in_tiles
    from ssscale.layout import PackedLayout
    from ssscale.model.decoder import Attention


def mix_retnet(q: Tensor, k: Tensor, v: Tensor, batch: Batch, layer: ExportedAttention) -> Tensor:
    return attend_in_tiles(retain, q, k, v, batch, layer)


def retain(
    q: Tensor, k: Tensor, v: Tensor, visible: Tensor, batch: Batch, layer: ExportedAttention, first: int
) -> Tensor:
    distance = batch.i[:, None, first : first + q.shape[2], None] - batch.j[:, None, None, :]
    decay = torch.exp(-layer.learned("rate")[:, None, None] * distance)
    return (layer.scale * q @ k.mT * decay).masked_fill(~visible, 0) @ v


@MIXERS.register("retnet")
@dataclass(frozen=True)
class RetNet(Mixer):
    positions = ("nope", "rope")
    ulysses = cached = True
    observes = ("retnet_size",)
    export = Export(mix_retnet, helpers=(retain,))

    rate: float = 0.05  # at the start of training

    def weights(self, model: ModelConfig) -> dict[str, Weight]:
        return {"rate": Weight((model.num_heads,), start=self.rate, split=0)}

    def flops(self, width: int, keys: float) -> float:
        return 12.0 * width * keys

    def kept_bytes(self, sizes: Sizes) -> float:
        return sizes.number * (sizes.q + sizes.kv) * sizes.rotated

    def attend(self, q: Tensor, k: Tensor, v: Tensor, layer: Attention, layout: PackedLayout) -> Tensor:
        import torch

        rate = layer.for_heads(layer.weights.take("rate"), q.shape[1])[:, None, None]
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        past, parts = layout.past, []
        for document, (first, last) in enumerate(pairwise(layout.cu_seqlens.tolist())):
            begin, length = (first, 0) if past is None else (document * past.capacity, past.lengths[document])
            keys = slice(begin, begin + length + last - first)
            distance = layout.positions[first:last, None] - torch.arange(keys.stop - begin, device=q.device)
            weights = torch.einsum("qnh,knh->nqk", q[first:last], k[keys]) * (layer.scale or q.shape[2] ** -0.5)
            weights = (weights * torch.exp(-rate * distance)).masked_fill(distance < 0, 0)
            parts.append(torch.einsum("nqk,knh->qnh", weights, v[keys]))
        return torch.cat(parts)

    def look(self, q: Tensor, k: Tensor, v: Tensor, layer: Attention, layout: PackedLayout) -> Tensor:
        return self.attend(q, k, v, layer, layout).float().abs().mean()[None]
