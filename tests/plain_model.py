"""An independent decoder in plain torch: no Megatron, no fusion, one document at a time."""

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from ssscale.layout import PackedLayout
from ssscale.schema import Core, ModelConfig, PositionMethod, SSMaxVariant


def rms(x: Tensor, w: Tensor, eps: float) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * w


def rope(x: Tensor, base: float) -> Tensor:
    """x: [L, N, H] of one document, by complex multiplication of the half-split pairs."""
    half = x.shape[-1] // 2
    theta = base ** (-torch.arange(half, dtype=torch.float64) * 2 / x.shape[-1])
    angle = torch.outer(torch.arange(len(x), dtype=torch.float64), theta)
    turned = (
        torch.complex(x[..., :half].double(), x[..., half:].double())
        * torch.polar(torch.ones_like(angle), angle)[:, None]
    )
    return torch.cat((turned.real, turned.imag), -1).to(x.dtype)


def attend(q: Tensor, k: Tensor, v: Tensor, config: ModelConfig, w: dict[str, Tensor], layer: str) -> Tensor:
    """One document: q [L, N, H], k, v [L, K, H]."""
    length, heads, size = q.shape
    k, v = (t.repeat_interleave(heads // t.shape[1], 1) for t in (k, v))
    z = torch.einsum("inh,jnh->nij", q, k) * (config.width.attention_scale or size**-0.5)
    earlier = torch.ones(length, length).tril().bool()
    if config.attention.core == Core.stickbreaking:
        out = torch.zeros_like(q)
        for i in range(length):  # the definition, key by key
            rest = torch.ones(heads)
            for j in range(i - 1, -1, -1):
                beta = torch.sigmoid(z[:, i, j])
                out[i] = out[i] + (rest * beta)[:, None] * v[j]
                rest = rest * (1 - beta)
            if config.attention.remainder:
                out[i] = out[i] + rest[:, None] * v[i]
        return out
    if config.attention.core == Core.ssmax:
        n = torch.arange(1, length + 1).to(q.dtype)
        base = w["pn"][:length] if config.attention.ssmax == SSMaxVariant.pn else n.log()
        s = w.get(f"{layer}.attention.core.s", torch.full((heads,), config.attention.ssmax_scale))
        b = w.get(f"{layer}.attention.core.b", torch.zeros(heads))
        z = z * (s[:, None] * base + b[:, None])[..., None]
    return torch.einsum("nij,jnh->inh", z.masked_fill(~earlier, -torch.inf).softmax(-1), v)


def plain_losses(
    w: dict[str, Tensor], config: ModelConfig, tokens: Tensor, layout: PackedLayout, labels: Tensor
) -> Tensor:
    """Losses [T] from a dictionary of whole weights named as the decoder names them."""
    x = w["embedding.weight"][tokens] * config.width.embedding_multiplier
    sizes = [
        config.num_heads * config.head_size,
        config.kv_heads * config.head_size,
        config.kv_heads * config.head_size,
    ]
    bounds = layout.cu_seqlens.tolist()
    for i in range(config.num_layers):
        layer = f"blocks.{i}"
        y = rms(x, w[f"{layer}.attention_norm.weight"], config.norm_eps) @ w[f"{layer}.attention.qkv.weight"].T
        q, k, v = (t.unflatten(-1, (-1, config.head_size)) for t in y.split(sizes, -1))
        parts = []
        for a, b in pairwise(bounds):
            qd, kd = q[a:b], k[a:b]
            if config.position.method == PositionMethod.rope:
                qd, kd = rope(qd, config.position.rope_base), rope(kd, config.position.rope_base)
            parts.append(attend(qd, kd, v[a:b], config, w, layer))
        m = config.width.residual_multiplier
        x = x + m * (torch.cat(parts).flatten(1) @ w[f"{layer}.attention.out.weight"].T)
        gate, up = (rms(x, w[f"{layer}.mlp_norm.weight"], config.norm_eps) @ w[f"{layer}.mlp.gate_up.weight"].T).chunk(
            2, -1
        )
        x = x + m * ((F.silu(gate) * up) @ w[f"{layer}.mlp.down.weight"].T)
    x = rms(x, w["norm.weight"], config.norm_eps) / config.width.logits_divisor
    head = w["embedding.weight"] if config.tie_embeddings else w["head.weight"]
    logits = (x @ head.T)[:, : config.vocab_size]
    return F.cross_entropy(logits, labels, reduction="none", ignore_index=-100)
