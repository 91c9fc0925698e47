"""The attention half of a block: projections and positions around a core."""

from typing import TYPE_CHECKING

from torch import Tensor, nn

from ssscale.attention import CORES
from ssscale.config.schema import ModelConfig
from ssscale.layout import PackedLayout
from ssscale.parallel.groups import Groups
from ssscale.parallel.megatron import TransformerConfig, column_linear, row_linear
from ssscale.position import Tables

if TYPE_CHECKING:
    from ssscale.model.cache import LayerCache


class SelfAttention(nn.Module):
    """y = W_o core(rotate(W_q x, W_k x), W_v x), grouped-query (arXiv:2305.13245). [T, D] → [T, D]."""

    def __init__(self, config: ModelConfig, groups: Groups, megatron: TransformerConfig) -> None:
        super().__init__()
        self.head_size = config.head_size
        self.heads = config.num_heads // groups.tensor_size
        q_size, kv_size = config.num_heads * self.head_size, config.kv_heads * self.head_size
        self.qkv = column_linear(config.hidden_size, (q_size, kv_size, kv_size), megatron)
        self.out = row_linear(q_size, config.hidden_size, megatron)
        self.core = CORES[config.attention.core.value](config, groups)

    def forward(self, x: Tensor, layout: PackedLayout, tables: Tables, cache: "LayerCache | None" = None) -> Tensor:
        qkv = self.qkv(x)[0].unflatten(-1, (-1, self.head_size))  # [T, N + 2K, H]
        extend = None if cache is None else cache.extend
        return self.out(self.core.attend(qkv, self.heads, layout, tables, extend).flatten(1))[0]
