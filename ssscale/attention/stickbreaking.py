"""Stick-breaking attention, arXiv:2410.17980."""

from torch import Tensor

from kernels.stickbreaking import stickbreaking_attention
from ssscale.attention.base import AttentionCore
from ssscale.config.schema import ModelConfig
from ssscale.layout import PackedLayout
from ssscale.parallel.groups import Groups
from ssscale.parallel.stickbreaking_ring import ring_stickbreaking


class StickBreakingCore(AttentionCore):
    """A_ij = β_ij Π_{i<k<j} (1 − β_kj), β = sigmoid(q·k / sqrt(H)), over strictly earlier keys   (Eq. 5)

    With the remainder, what is left of the stick goes to the query's own value: o_j += Π_{k<j} (1 − β_kj) v_j (Eq. 13).
    """

    def __init__(self, config: ModelConfig, groups: Groups) -> None:
        super().__init__(config, groups)
        self.remainder = config.attention.remainder
        self.skip_below = config.attention.skip_below

    def forward(self, q: Tensor, k: Tensor, v: Tensor, layout: PackedLayout) -> Tensor:
        past = layout.past
        if layout.ring is not None:
            o, log_rest = ring_stickbreaking(q, k, v, layout, self.groups, self.scale, self.skip_below)
        else:
            o, log_rest = stickbreaking_attention(
                q,
                k,
                v,
                cu_seqlens_q=layout.cu_seqlens,
                cu_seqlens_k=layout.cu_seqlens if past is None else past.cu_seqlens,
                max_seqlen_q=layout.max_seqlen,
                max_seqlen_k=layout.max_seqlen if past is None else past.capacity,
                q_offsets=None if past is None else past.offsets,
                scale=self.scale,
                skip_below=self.skip_below,
            )
        if self.remainder:
            own = v if past is None else v[past.rows]
            own = own.repeat_interleave(q.shape[1] // v.shape[1], 1)
            o = o + (log_rest.exp()[..., None] * own).to(o.dtype)
        return o
