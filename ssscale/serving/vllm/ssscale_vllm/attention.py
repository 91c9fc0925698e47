"""The attention layer: vLLM's parallel projections and paged cache around a mixer. T tokens, N and K heads of a rank."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from vllm.config import VllmConfig
from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size
from vllm.model_executor.layers.attention import Attention as PagedAttention
from vllm.model_executor.layers.linear import QKVParallelLinear, RowParallelLinear
from vllm.model_executor.model_loader.weight_utils import sharded_weight_loader
from vllm.model_executor.utils import set_weight_attrs
from vllm.platforms import current_platform
from vllm.utils.import_utils import resolve_obj_by_qualname

from .config import Model
from .mixer import Mixer, Shape
from .projections import Projections

# The others accept slopes, and some then ignore them.
ALIBI_BACKENDS = ("CPU_ATTN", "FLASH_ATTN", "TRITON_ATTN")


class Learned(nn.Module):
    """Learned vectors by name, in float32 whatever the dtype of the model. split: each rank holds its heads' part."""

    def __init__(self, shapes: dict[str, Shape], split: bool) -> None:
        super().__init__()
        ranks = get_tensor_model_parallel_world_size() if split else 1
        for name, (size,) in shapes.items():
            weight = nn.Parameter(torch.ones(size // ranks, dtype=torch.float32), requires_grad=False)
            if split:
                set_weight_attrs(weight, {"weight_loader": sharded_weight_loader(0)})
            self.register_parameter(name, weight)

    def all(self) -> dict[str, Tensor]:
        return dict(self.named_parameters())


def rotate(x: Tensor, tables: tuple[Tensor, Tensor] | None, factor: Tensor | None) -> Tensor:
    """Rotates x [T, heads, H] (halves are pairs) and multiplies it by `factor` in float32; rounds once."""
    if tables is None and factor is None:
        return x
    y = x.float()
    if tables is not None:
        cos, sin = tables
        a, b = y.chunk(2, -1)
        y = torch.cat((a * cos - b * sin, b * cos + a * sin), -1)
    return (y if factor is None else y * factor[..., None]).to(x.dtype)


class Attention(nn.Module):
    """y = W_o mix(rotate(W_q x, W_k x), W_v x). W_q, W_k and W_v are one matrix; `mix` is the layer's mixer."""

    def __init__(self, model: Model, mixer: Mixer, vllm_config: VllmConfig, prefix: str) -> None:
        super().__init__()
        ranks = get_tensor_model_parallel_world_size()
        self.mixer, self.head_dim = mixer, model.head_dim
        self.placed = mixer.place(model.position.name)
        self.heads, self.kv_heads = model.num_heads // ranks, max(1, model.num_kv_heads // ranks)
        self.qkv = QKVParallelLinear(
            model.hidden_size,
            model.head_dim,
            model.num_heads,
            model.num_kv_heads,
            bias=False,
            prefix=f"{prefix}.qkv",
        )
        self.out = RowParallelLinear(
            model.num_heads * model.head_dim, model.hidden_size, bias=False, prefix=f"{prefix}.out"
        )
        self.projection_weights = Projections(model)
        self.weights = Learned(mixer.layer_weights(model.num_heads), split=True)
        self.attention = PagedAttention(
            self.heads,
            model.head_dim,
            model.width.attention_scale,
            num_kv_heads=self.kv_heads,
            alibi_slopes=self._slopes(model),
            cache_config=vllm_config.cache_config,
            per_layer_sliding_window=model.position.window if mixer.windowed else None,
            prefix=f"{prefix}.attention",
            attn_backend=_backend(mixer),
            **mixer.backend_arguments(),
        )
        self._check_backend()

    def _slopes(self, model: Model) -> list[float] | None:
        """The slopes of this rank's heads."""
        slopes = model.position.slopes(model.num_heads) if self.placed else None
        first = get_tensor_model_parallel_rank() * self.heads
        return None if slopes is None else slopes[first : first + self.heads]

    def _check_backend(self) -> None:
        name = self.attention.attn_backend.get_name()
        if self.mixer.backend is None and name.startswith("SSSCALE_"):
            raise ValueError(f"the attention backend {name} does not compute {self.mixer.name}: choose another one")
        if getattr(self.attention.impl, "alibi_slopes", None) is not None and name not in ALIBI_BACKENDS:
            known = " or ".join(ALIBI_BACKENDS)
            raise ValueError(f"ALiBi cannot be served on the attention backend {name}: use --attention-backend {known}")

    def forward(self, x: Tensor, tables: tuple[Tensor, Tensor] | None, prepared: Tensor | None) -> Tensor:
        """x: [T, D]. tables: cos and sin. prepared: what the mixer's layers share."""
        q, k, v = self.qkv(x)[0].split([h * self.head_dim for h in (self.heads, self.kv_heads, self.kv_heads)], -1)
        q, k, v = self.projection_weights(*(x.unflatten(-1, (-1, self.head_dim)) for x in (q, k, v)))
        own = tables if self.placed else None
        q = rotate(q, own, self.mixer.factor(prepared, self.weights.all()))
        k = rotate(k, own, None)
        return self.out(self.attention(q.flatten(1), k.flatten(1), v.flatten(1).contiguous()))[0]


def _backend(mixer: Mixer) -> type[Any] | None:
    """Returns the mixer's own backend for this machine, or None for vLLM's. Raises ValueError if there is none."""
    if mixer.backend is None:
        return None
    platform = current_platform.device_type
    if platform not in mixer.backend.paths:
        raise ValueError(
            f"layers of {mixer.name} cannot be served on {platform} yet, only on {', '.join(mixer.backend.paths)}"
        )
    return resolve_obj_by_qualname(mixer.backend.paths[platform])
