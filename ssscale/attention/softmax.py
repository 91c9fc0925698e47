"""Softmax attention."""

from torch import Tensor

from kernels.softmax import softmax_attention
from ssscale.attention.base import AttentionCore
from ssscale.layout import PackedLayout


class SoftmaxCore(AttentionCore):
    """o_i = Σ_{j ≤ i} softmax_j(q_i·k_j / sqrt(H)) v_j   (arXiv:1706.03762, Eq. 1)"""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, layout: PackedLayout) -> Tensor:
        return softmax_attention(
            q,
            k,
            v,
            cu_seqlens=layout.cu_seqlens,
            max_seqlen=layout.max_seqlen,
            uniform_length=layout.uniform_length,
            window=self.window,
            scale=self.scale,
        )
