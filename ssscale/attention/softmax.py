"""Softmax attention."""

from torch import Tensor

from kernels.cached import cached_attention
from kernels.exact import exact_attention
from kernels.softmax import softmax_attention
from kernels.ssmax import rotary_attention
from ssscale.attention.base import AttentionCore, Extend
from ssscale.config.schema import ModelConfig
from ssscale.layout import PackedLayout
from ssscale.parallel.groups import Groups
from ssscale.parallel.softmax_ring import ring_softmax
from ssscale.position import Tables
from ssscale.position.bias import position_bias


class SoftmaxCore(AttentionCore):
    """o_i = Σ_{j ≤ i} softmax_j(q_i·k_j / sqrt(H) + bias_ij) v_j   (arXiv:1706.03762, Eq. 1)

    The bias is the position method's, where it is one. A window leaves the keys i − window < j ≤ i.
    """

    def __init__(self, config: ModelConfig, groups: Groups) -> None:
        super().__init__(config, groups)
        self.bias = position_bias(config, groups)

    def factor_parameters(self, tables: Tables) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """base [T], s [N] and b [N] of the factor s · base + b of q; None where there is none."""
        return None, None, None

    def attend(
        self, qkv: Tensor, num_heads: int, layout: PackedLayout, tables: Tables, extend: Extend | None = None
    ) -> Tensor:
        base, s, b = self.factor_parameters(tables)
        unchanged = tables.cos is None and base is None
        shared = layout.gathered is not None or layout.ring is not None
        if extend is not None or self.bias is not None or unchanged or shared:
            return super().attend(qkv, num_heads, layout, tables, extend)
        return rotary_attention(
            qkv,
            num_heads,
            cu_seqlens=layout.cu_seqlens,
            max_seqlen=layout.max_seqlen,
            cos=tables.cos,
            sin=tables.sin,
            base=base,
            s=s,
            b=b,
            uniform_length=layout.uniform_length,
            window=self.window,
            scale=self.scale,
        )

    def forward(self, q: Tensor, k: Tensor, v: Tensor, layout: PackedLayout) -> Tensor:
        if layout.past is not None:
            past = layout.past
            return cached_attention(
                q,
                k,
                v,
                starts=past.starts,
                lengths=past.lengths,
                rows=past.rows,
                capacity=past.capacity,
                window=self.window,
                scale=self.scale,
                bias=self.bias,
                plan=past.decode,
            )
        if layout.ring is not None:
            return ring_softmax(q, k, v, layout, self.groups, self.scale)
        if self.bias is not None and layout.block_mask is not None:
            return self.bias.attend(q, k, v, layout, self.scale)
        if self.bias is not None:
            bounds = layout.cu_seqlens.tolist()
            return exact_attention(
                q, k, v, starts_q=bounds, starts_k=bounds, window=self.window, scale=self.scale, bias=self.bias
            )
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
