"""The feed-forward half of a block."""

import torch.nn.functional as F
from torch import Tensor, nn

from ssscale.config.schema import ModelConfig
from ssscale.parallel.megatron import TransformerConfig, column_linear, row_linear


class SwiGLU(nn.Module):
    """y = W_down (silu(W_gate x) ⊙ W_up x)   (arXiv:2002.05202, Eq. 6). [T, D] → [T, D]."""

    def __init__(self, config: ModelConfig, megatron: TransformerConfig) -> None:
        super().__init__()
        size, inner = config.hidden_size, config.ffn_hidden_size
        self.gate_up = column_linear(size, (inner, inner), megatron)
        self.down = row_linear(inner, size, megatron)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x)[0].chunk(2, -1)
        return self.down(F.silu(gate) * up)[0]
