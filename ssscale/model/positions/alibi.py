"""ALiBi: a bias that decreases with the distance."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ssscale.config.registry import POSITIONS
from ssscale.model.positions.bias import BiasPosition

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from ssscale.layout import PackedLayout
    from ssscale.model.decoder import Attention


def alibi_slopes(num_heads: int, heads: range, device: torch.device) -> Tensor:
    """Returns m_h = 2^(−8h / N), h = 1 … N, for the heads h − 1 in `heads`, float32   (arXiv:2108.12409, Section 3)

    If N is not a power of two, the first P heads take the slopes for P, the largest power below N. The others take
    every second slope for 2P.
    """
    import torch

    power = 1 << (num_heads.bit_length() - 1)
    head = torch.arange(heads.start, heads.stop, device=device, dtype=torch.float32)
    exponent = torch.where(head < power, head + 1, head - power + 0.5)
    return torch.exp2(-8 / power * exponent)


@POSITIONS.register("alibi")
@dataclass(frozen=True)
class ALiBi(BiasPosition):
    """bias(i, j) = −m_h · (i − j)   (arXiv:2108.12409, Eq. 1)"""

    exported = True

    def bias(self, layer: Attention) -> ALiBiBias:
        first = layer.groups.tensor_rank * layer.heads
        return ALiBiBias(layer.heads * layer.groups.tensor_size, range(first, first + layer.heads))


@dataclass(frozen=True)
class ALiBiBias:
    """The bias of the heads in `heads`, out of num_heads heads of the whole model."""

    num_heads: int
    heads: range

    def slopes(self, device: torch.device) -> Tensor:
        return alibi_slopes(self.num_heads, self.heads, device)

    def narrow(self, first: int, count: int) -> ALiBiBias:
        return ALiBiBias(self.num_heads, self.heads[first : first + count])

    def __call__(self, i: Tensor, j: Tensor) -> Tensor:
        distance = (i[..., :, None] - j[..., None, :]).float()
        return -self.slopes(i.device)[:, None, None] * distance.unsqueeze(-3)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, layout: PackedLayout, scale: float | None) -> Tensor:
        from ssscale_kernels.flex import biased_attention, linear_bias

        score_mod = linear_bias(self.slopes(q.device))
        return biased_attention(q, k, v, score_mod=score_mod, block_mask=layout.block_mask, scale=scale)
