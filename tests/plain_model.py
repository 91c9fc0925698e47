"""An independent decoder in plain torch: no Megatron, no fusion, one document at a time."""

import math
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from ssscale.config.schema import ModelConfig
from ssscale.layout import PackedLayout
from ssscale.model.mixers.ssmax import Variant
from ssscale.model.positions.rope import RoPE, RopeScaling


def rms(x: Tensor, w: Tensor, eps: float) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * w


def rope(x: Tensor, position: RoPE) -> Tensor:
    """x: [L, N, H] of one document, by complex multiplication of the half-split pairs."""
    size, base, step = x.shape[-1], position.base, 1.0
    half = size // 2
    if position.scaling == RopeScaling.linear:
        step = 1 / position.factor
    elif position.scaling == RopeScaling.ntk:
        base *= position.factor ** (size / (size - 2))
    elif position.scaling == RopeScaling.dynamic_ntk and len(x) > position.train_length:
        f = position.factor
        base *= (f * len(x) / position.train_length - (f - 1)) ** (size / (size - 2))
    theta = base ** (-torch.arange(half, dtype=torch.float64) * 2 / size)
    if position.scaling == RopeScaling.llama3:
        theta = torch.tensor([llama3(float(t), position) for t in theta], dtype=torch.float64)
    angle = torch.outer(torch.arange(len(x), dtype=torch.float64) * step, theta)
    turned = (
        torch.complex(x[..., :half].double(), x[..., half:].double())
        * torch.polar(torch.ones_like(angle), angle)[:, None]
    )
    return torch.cat((turned.real, turned.imag), -1).to(x.dtype)


def llama3(theta: float, position: RoPE) -> float:
    """The three cases of Llama 3.1's code, by wavelength."""
    length, wavelength = position.train_length, 2 * math.pi / theta
    if wavelength < length / position.high_freq_factor:
        return theta
    if wavelength > length / position.low_freq_factor:
        return theta / position.factor
    low, high = position.low_freq_factor, position.high_freq_factor
    smooth = (length / wavelength - low) / (high - low)
    return (1 - smooth) * theta / position.factor + smooth * theta


def alibi(length: int, heads: int) -> Tensor:
    """[N, L, L], by the recursion of the paper's code."""

    def slopes(n: int) -> list[float]:
        if n & (n - 1) == 0:
            return [2 ** (-8 * (h + 1) / n) for h in range(n)]
        power = 1 << (n.bit_length() - 1)
        return slopes(power) + slopes(2 * power)[0::2][: n - power]

    distance = torch.arange(length)[:, None] - torch.arange(length)
    return -torch.tensor(slopes(heads), dtype=torch.float64)[:, None, None] * distance


def fire(length: int, w: dict[str, Tensor], name: str) -> Tensor:
    """[N, L, L], pair by pair of positions."""
    c, threshold = w[f"{name}.c"].abs(), (w[f"{name}.length_multiplier"] * 512).abs()
    rows = []
    for i in range(length):
        far = torch.maximum(torch.tensor(float(i)).to(threshold), threshold)
        below = torch.log(c * far + 1) + 1e-6
        row = []
        for j in range(length):
            x = torch.log(c * abs(i - j) + 1) / below
            hidden = F.relu(F.linear(x, w[f"{name}.w1"], w[f"{name}.b1"]))
            row.append(F.linear(hidden, w[f"{name}.w2"], w[f"{name}.b2"]))
        rows.append(torch.stack(row))
    return torch.stack(rows).permute(2, 0, 1)


def attend(
    q: Tensor, k: Tensor, v: Tensor, config: ModelConfig, w: dict[str, Tensor], layer: str, mixer: str
) -> Tensor:
    """One document: q [L, N, H], k, v [L, K, H]."""
    length, heads, size = q.shape
    k, v = (t.repeat_interleave(heads // t.shape[1], 1) for t in (k, v))
    z = torch.einsum("inh,jnh->nij", q, k) * (config.width.attention_scale or size**-0.5)
    position, bias = config.position, f"{layer}.attention.position_weights"
    earlier = torch.ones(length, length).tril().bool()
    if position.window is not None and mixer != "stickbreaking":
        earlier &= torch.ones(length, length).triu(1 - position.window).bool()
    if position.method == "alibi" and mixer != "stickbreaking":
        z = z + alibi(length, heads).to(z)
    if position.method == "fire":
        z = z + fire(length, w, bias)
    if mixer == "stickbreaking":
        out = torch.zeros_like(q)
        for i in range(length):  # the definition, key by key
            rest = torch.ones(heads)
            for j in range(i - 1, -1, -1):
                beta = torch.sigmoid(z[:, i, j])
                out[i] = out[i] + (rest * beta)[:, None] * v[j]
                rest = rest * (1 - beta)
            if config.mixer.stickbreaking.remainder:
                out[i] = out[i] + rest[:, None] * v[i]
        return out
    if mixer == "ssmax":
        n = torch.arange(1, length + 1)
        n = n if position.window is None else n.clamp(max=position.window)
        base = w["shared.ssmax.pn"][n - 1] if config.mixer.ssmax.variant == Variant.pn else n.to(q.dtype).log()
        s = w.get(f"{layer}.attention.weights.s", torch.full((heads,), config.mixer.ssmax.scale))
        b = w.get(f"{layer}.attention.weights.b", torch.zeros(heads))
        z = z * (s[:, None] * base + b[:, None])[..., None]
    return torch.einsum("nij,jnh->inh", z.masked_fill(~earlier, -torch.inf).softmax(-1), v)


def plain_losses(
    w: dict[str, Tensor], config: ModelConfig, tokens: Tensor, layout: PackedLayout, labels: Tensor
) -> Tensor:
    """Losses [T] from a dictionary of whole weights named as the decoder names them."""
    logits = plain_logits(w, config, tokens, layout)
    return F.cross_entropy(logits, labels, reduction="none", ignore_index=-100)


def plain_logits(w: dict[str, Tensor], config: ModelConfig, tokens: Tensor, layout: PackedLayout) -> Tensor:
    """[T, vocab_size], in the weights' dtype throughout."""
    x = w["embedding.weight"][tokens] * config.width.embedding_multiplier
    sizes = [
        config.num_heads * config.head_size,
        config.kv_heads * config.head_size,
        config.kv_heads * config.head_size,
    ]
    bounds = layout.cu_seqlens.tolist()
    for i in range(config.num_layers):
        layer, mixer = f"blocks.{i}", config.mixers[i % len(config.mixers)]
        y = rms(x, w[f"{layer}.attention_norm.weight"], config.norm_eps) @ w[f"{layer}.attention.qkv.weight"].T
        extra = f"{layer}.attention.projection_weights"
        if config.qkv_bias:
            y = y + torch.cat([w[f"{extra}.{name}_bias"] for name in "qkv"])
        q, k, v = (t.unflatten(-1, (-1, config.head_size)) for t in y.split(sizes, -1))
        if config.qk_norm:
            q, k = (rms(t, w[f"{extra}.{name}_norm"], config.norm_eps) for name, t in (("q", q), ("k", k)))
        parts = []
        for a, b in pairwise(bounds):
            qd, kd = q[a:b], k[a:b]
            if config.position.method == "rope" and mixer != "stickbreaking":
                qd, kd = rope(qd, config.position.rope), rope(kd, config.position.rope)
            parts.append(attend(qd, kd, v[a:b], config, w, layer, mixer))
        m = config.width.residual_multiplier
        x = x + m * (torch.cat(parts).flatten(1) @ w[f"{layer}.attention.out.weight"].T)
        gate, up = (rms(x, w[f"{layer}.mlp_norm.weight"], config.norm_eps) @ w[f"{layer}.mlp.gate_up.weight"].T).chunk(
            2, -1
        )
        x = x + m * ((F.silu(gate) * up) @ w[f"{layer}.mlp.down.weight"].T)
    x = rms(x, w["norm.weight"], config.norm_eps) / config.logits_divisor
    head = w["embedding.weight"] if config.tie_embeddings else w["head.weight"]
    return (x @ head.T)[:, : config.vocab_size]
