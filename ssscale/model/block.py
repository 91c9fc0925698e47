"""One decoder block."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from ssscale.config.schema import ModelConfig, Recompute
from ssscale.layout import PackedLayout
from ssscale.model.attention import SelfAttention
from ssscale.model.mlp import SwiGLU
from ssscale.model.norm import RMSNorm
from ssscale.model.recompute import keep_products
from ssscale.parallel.groups import Groups
from ssscale.parallel.megatron import TransformerConfig
from ssscale.position import Tables

if TYPE_CHECKING:
    from ssscale.model.cache import LayerCache


class Block(nn.Module):
    """h = x + m · attention(norm(x)); y = h + m · mlp(norm(h))   (pre-norm, as Llama 2; m = 1 but for the width transfer)

    x: [T, D], under sequence parallelism [T / tensor_size, D]. `selective` recomputation is a part of the block, and so of its
    compiled graph; `full` is around it.
    """

    def __init__(
        self, config: ModelConfig, groups: Groups, megatron: TransformerConfig, recompute: Recompute = Recompute.none
    ) -> None:
        super().__init__()
        self.selective = recompute == Recompute.selective
        self.multiplier = config.width.residual_multiplier
        partial = megatron.sequence_parallel
        self.attention_norm = RMSNorm(config.hidden_size, config.norm_eps, groups, partial)
        self.attention = SelfAttention(config, groups, megatron)
        self.mlp_norm = RMSNorm(config.hidden_size, config.norm_eps, groups, partial)
        self.mlp = SwiGLU(config, megatron)

    def forward(self, x: Tensor, layout: PackedLayout, tables: Tables, cache: "LayerCache | None" = None) -> Tensor:
        if self.selective and cache is None and torch.is_grad_enabled():
            return keep_products(self._layer, x, layout, tables)
        return self._layer(x, layout, tables, cache)

    def _layer(self, x: Tensor, layout: PackedLayout, tables: Tables, cache: "LayerCache | None" = None) -> Tensor:
        x = x + self._scaled(self.attention(self.attention_norm(x), layout, tables, cache))
        return x + self._scaled(self.mlp(self.mlp_norm(x)))

    def _scaled(self, branch: Tensor) -> Tensor:
        return branch if self.multiplier == 1.0 else branch * self.multiplier
