"""Softmax attention."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any, ClassVar

from ssscale.config.registry import MIXERS
from ssscale.model.mixers.base import Export, Extend, Mixer, Sizes, Tables

if TYPE_CHECKING:
    import torch
    import torch.nn.functional as F
    from torch import Tensor

    from ssscale.config.schema import ModelConfig
    from ssscale.hf.modeling_ssscale import Attention as ExportedAttention
    from ssscale.hf.modeling_ssscale import Batch, attend_in_tiles, biased, fused
    from ssscale.layout import PackedLayout
    from ssscale.model.decoder import Attention


class Backend(StrEnum):
    """The attention kernel on a GPU. docs/guide/model.md has the rules by which `auto` chooses one."""

    auto = "auto"
    cudnn = "cudnn"
    flash = "flash"


# (base [T], s [N], b [N]): q is multiplied by s · base + b. base is ln n or p_n. If b is None, it counts as 0. If all
# three are None, q is not scaled.
Factor = tuple["Tensor | None", "Tensor | None", "Tensor | None"]


def mix_softmax(q: Tensor, k: Tensor, v: Tensor, batch: Batch, layer: ExportedAttention) -> Tensor:
    """Σ_j softmax_j(scale · q·k_j + bias_ij) v_j   (arXiv:1706.03762, Eq. 1)"""
    if layer.bias is not None:
        return attend_in_tiles(biased, q, k, v, batch, layer, inner=layer.bias.inner)
    o = fused(q, k, v, batch, layer)
    return attend_in_tiles(softmax_tile, q, k, v, batch, layer) if o is None else o


def softmax_tile(
    q: Tensor, k: Tensor, v: Tensor, visible: Tensor, batch: Batch, layer: ExportedAttention, first: int
) -> Tensor:
    """Returns the output for a block of queries under an explicit mask, which a window or padding makes necessary."""
    return F.scaled_dot_product_attention(q, k, v, attn_mask=visible, scale=layer.scale)


@MIXERS.register("softmax", default=True)
@dataclass(frozen=True)
class Softmax(Mixer):
    """o_i = Σ_{j ≤ i} softmax_j(q_i·k_j / sqrt(H) + bias_ij) v_j   (arXiv:1706.03762, Eq. 1)

    bias_ij comes from the position methods ALiBi and FIRE. The other methods have none. With a window, query i attends to
    the keys i − window < j ≤ i.
    """

    backend: Backend = Backend.auto  # the kernel on a GPU

    positions: ClassVar[tuple[str, ...]] = ("rope", "nope", "alibi", "fire")
    no_window = None
    ulysses = ring = cached = True
    kept_operators = ("attention", "attn")
    export = Export(mix_softmax, helpers=(softmax_tile,))

    @property
    def plain(self) -> bool:
        return type(self) is Softmax  # subclasses change the logits

    @property
    def varies(self) -> tuple[str, str] | None:
        if self.backend is not Backend.cudnn:
            return None
        return "backend=cudnn", "cuDNN has no deterministic gradients; use backend=auto or backend=flash"

    def flops(self, width: int, keys: float) -> float:
        """Returns the FLOPs per token: two matrix products forward and four backward, each 2 · width · keys."""
        return 12.0 * width * keys

    def kept_bytes(self, sizes: Sizes) -> float:
        """Returns the bytes kept for the backward pass: the log-sum-exp, and the rotated copies of q and k.

        Whatever the mixer, the memory estimate itself counts one copy of v. With rotation under Ulysses alone (no ring), v is
        not copied, so this copy is subtracted here.
        """
        copies = sizes.q + sizes.kv if sizes.rotated else 0.0
        if sizes.ring == 1 and sizes.ulysses > 1 and sizes.rotated:
            copies -= sizes.kv
        return sizes.number * copies + 4 * sizes.heads

    def factor_parameters(self, layer: Attention, tables: Tables) -> Factor:
        return None, None, None

    def mix(
        self, qkv: Tensor, layer: Attention, layout: PackedLayout, tables: Tables, extend: Extend | None = None
    ) -> Tensor:
        """Rotates q and k, scales q (SSMax only) and computes attention in one operator if possible.

        It is not possible with a KV cache, a bias or context parallelism. It is not needed
        if there is neither a rotation nor a factor of q.
        """
        from ssscale_kernels.ssmax import rotary_attention

        base, s, b = self.factor_parameters(layer, tables)
        unchanged = tables.rotation is None and base is None
        shared = layout.gathered is not None or layout.ring is not None
        if extend is not None or layer.position.adds_bias or unchanged or shared:
            return super().mix(qkv, layer, layout, tables, extend)
        cos, sin = tables.rotation or (None, None)
        return rotary_attention(
            qkv,
            layer.heads,
            cu_seqlens=layout.cu_seqlens,
            max_seqlen=layout.max_seqlen,
            cos=cos,
            sin=sin,
            log_n=base,
            s=s,
            b=b,
            uniform_length=layout.uniform_length,
            window=layer.window,
            scale=layer.scale,
            backend=self.backend.value,
        )

    def attend(self, q: Tensor, k: Tensor, v: Tensor, layer: Attention, layout: PackedLayout) -> Tensor:
        from ssscale_kernels.exact import exact_attention
        from ssscale_kernels.softmax import softmax_attention

        from ssscale.parallel.softmax_ring import ring_softmax

        window, scale, bias = layer.window, layer.scale, layer.position.bias(layer)
        if bias is not None and q.shape[1] < layer.heads:
            bias = bias.narrow(layer.groups.ulysses_rank * q.shape[1], q.shape[1])
        if layout.past is not None:
            return _attend_cached(q, k, v, layout, window, scale, bias, layout.past.decode.get(self.name))
        if layout.ring is not None:
            return ring_softmax(q, k, v, layout, layer.groups, scale, self.backend.value)
        if bias is not None and layout.block_mask is not None:
            return bias.attend(q, k, v, layout, scale)
        if bias is not None:
            bounds = layout.cu_seqlens.tolist()
            return exact_attention(q, k, v, starts_q=bounds, starts_k=bounds, window=window, scale=scale, bias=bias)
        return softmax_attention(
            q,
            k,
            v,
            cu_seqlens=layout.cu_seqlens,
            max_seqlen=layout.max_seqlen,
            uniform_length=layout.uniform_length,
            window=window,
            scale=scale,
            backend=self.backend.value,
        )

    def plan_decode(
        self, starts: list[int], lengths: list[int], rows: Tensor, capacity: int, window: int | None
    ) -> Any:
        from ssscale_kernels.cached import plan_decode

        return plan_decode(starts, lengths, rows, capacity, window)

    def chosen(self, model: ModelConfig, device: torch.device, dtype: torch.dtype, length: int) -> str:
        import torch
        from ssscale_kernels.softmax import choose_backend

        if model.place.adds_bias:
            return f"with {model.place.name} in " + ("FlexAttention" if device.type == "cuda" else "plain torch")
        deterministic = torch.are_deterministic_algorithms_enabled()
        window = model.position.window
        return f"on {choose_backend(device, dtype, model.head_size, length, window, deterministic, self.backend.value)}"


def _attend_cached(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: PackedLayout,
    window: int | None,
    scale: float | None,
    bias: Any,
    plan: Any,
) -> Tensor:
    from ssscale_kernels.cached import cached_attention

    past = layout.past
    assert past is not None
    return cached_attention(
        q,
        k,
        v,
        starts=past.starts,
        lengths=past.lengths,
        rows=past.rows,
        capacity=past.capacity,
        window=window,
        scale=scale,
        bias=bias,
        plan=plan,
    )
