"""The layers of an exported model. This file is saved with the weights and needs only torch and transformers.

x: [B, T, D]; q: [B, N, T, H]; k, v: [B, K, S, H], S: cached and new tokens.
"""

from __future__ import annotations

from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.cache_utils import Cache
from transformers.modeling_layers import GradientCheckpointingLayer

from .attention_ssscale import Batch, Part
from .configuration_ssscale import SSScaleConfig
from .positions_ssscale import BIASES, rotate


class Learned(nn.Module):
    """Learned tensors by name, filled with their start values."""

    def __init__(self, config: SSScaleConfig, prefix: str) -> None:
        super().__init__()
        for name, shape, start in config.learned:
            if name.startswith(prefix + "."):
                self.register_parameter(name[len(prefix) + 1 :], nn.Parameter(torch.full(shape, float(start))))

    def forward(self, name: str) -> Tensor | None:
        """Returns the tensor of this name, or None. Weights that are kept on a disk are read when a module is called."""
        return getattr(self, name, None)


class SSScaleRMSNorm(nn.Module):
    """y = x / sqrt(mean(x²) + ε) · w"""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), self.weight, self.eps)


class SwiGLU(nn.Module):
    """y = W_down (silu(W_gate x) ⊙ W_up x). W_gate and W_up are one matrix."""

    def __init__(self, config: SSScaleConfig) -> None:
        super().__init__()
        self.gate_up = nn.Linear(config.hidden_size, 2 * config.intermediate_size, bias=False)
        self.down = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, -1)
        return self.down(F.silu(gate) * up)


class Attention(nn.Module):
    """y = W_o mix(rotate(W_q x, W_k x), W_v x). W_q, W_k and W_v are one matrix; `mix` is the layer's mixer.

    With qkv_bias, W_q x, W_k x and W_v x get biases. With qk_norm, each head of q and k is normed before its rotation.
    """

    def __init__(self, config: SSScaleConfig, layer: int, part: Part) -> None:
        super().__init__()
        self.layer, self.head_dim, self.part = layer, config.head_dim, part
        self.options = config.mixer[config.mixers[layer % len(config.mixers)]]
        placed = config.position["method"] in self.options["positions"]
        self.window = config.position["window"] if self.options["windowed"] else None
        self.scale = config.width["attention_scale"] or config.head_dim**-0.5
        self.rotates = placed and config.position["method"] == "rope"
        self.sizes = (config.num_attention_heads, config.num_key_value_heads, config.num_key_value_heads)
        self.qkv = nn.Linear(config.hidden_size, sum(self.sizes) * self.head_dim, bias=False)
        self.out = nn.Linear(config.num_attention_heads * self.head_dim, config.hidden_size, bias=False)
        self.biased, self.normed, self.eps = config.qkv_bias, config.qk_norm, config.rms_norm_eps
        self.projection_weights = Learned(config, f"blocks.{layer}.attention.projection_weights")
        self.weights = Learned(config, f"blocks.{layer}.attention.weights")
        self.position_weights = Learned(config, f"blocks.{layer}.attention.position_weights")
        bias = BIASES.get(config.position["method"]) if placed else None
        self.bias = bias(self.sizes[0], self.position_weights) if bias else None

    def learned(self, name: str) -> Tensor | None:
        """Returns the mixer's weight of this name, or None."""
        return self.weights(name)

    def forward(self, x: Tensor, batch: Batch, cache: Cache | None, weights: bool) -> tuple[Tensor, Tensor | None]:
        """Returns y and, if `weights`, the attention weights [B, N, T, S]."""
        qkv = self.qkv(x)
        if self.biased:
            qkv = qkv + torch.cat([cast(Tensor, self.projection_weights(f"{name}_bias")) for name in ("q", "k", "v")])
        q, k, v = qkv.unflatten(-1, (-1, self.head_dim)).transpose(1, 2).split(self.sizes, 1)
        if self.normed:
            q = F.rms_norm(q, (self.head_dim,), self.projection_weights("q_norm"), self.eps)
            k = F.rms_norm(k, (self.head_dim,), self.projection_weights("k_norm"), self.eps)
        factor = self.part.factor(batch, self) if self.part.factor else None
        rotation = batch.rotation if self.rotates else None
        q, k = rotate(q, rotation, factor), rotate(k, rotation)
        if cache is not None:
            k, v = cache.update(k, v, self.layer, {"cache_position": batch.columns})
            k, v = k[:, :, : batch.j.shape[1]], v[:, :, : batch.j.shape[1]]
        found = None
        if weights:
            # What a mixer returns is linear in v, so that unit vectors as values give its weights.
            units = torch.eye(k.shape[2], dtype=v.dtype, device=v.device).expand(*k.shape[:2], -1, -1)
            found = self.part.mix(q, k, units, batch, self)
        return self.out(self.part.mix(q, k, v, batch, self).transpose(1, 2).flatten(2)), found


class Block(GradientCheckpointingLayer):
    """h = x + m · attention(norm(x)); y = h + m · mlp(norm(h))"""

    def __init__(self, config: SSScaleConfig, layer: int, part: Part) -> None:
        super().__init__()
        self.multiplier = config.width["residual_multiplier"]
        self.attention_norm = SSScaleRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.attention = Attention(config, layer, part)
        self.mlp_norm = SSScaleRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = SwiGLU(config)

    def forward(
        self, x: Tensor, batch: Batch, weights: bool = False, past_key_values: Cache | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """Returns y and, if `weights`, the attention weights [B, N, T, S]."""
        mixed, found = self.attention(self.attention_norm(x), batch, past_key_values, weights)
        x = x + self.multiplier * mixed
        return x + self.multiplier * self.mlp(self.mlp_norm(x)), found
