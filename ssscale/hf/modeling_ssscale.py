"""The model in plain torch, for transformers. This file travels with exported weights: it needs torch and transformers alone.

Its weights have the names and shapes of the model that was trained, the vocabulary's padding cut off.
x: [B, T, D]; q: [B, N, T, H]; k, v: [B, K, S, H], S = cached tokens and these.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import GenerationMixin, PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache
from transformers.modeling_outputs import CausalLMOutputWithPast

from .configuration_ssscale import SSScaleConfig

FIRE_HIDDEN, FIRE_LENGTH, FIRE_EPS = 32, 512.0, 1e-6
TILE_ELEMENTS = 1 << 24  # of the temporaries of a block of queries, where no fused kernel serves
DEFAULT_NEW_TOKENS = 20  # transformers', where generate() is told neither max_new_tokens nor max_length


@dataclass
class Batch:
    """What all layers share of a forward pass.

    i: [B, T] the queries' positions in their texts; j: [B, S] the keys'. real: [B, S] False for padding; None: no padding.
    past: cached tokens. cos, sin: [B, T, H / 2] float32. n: what SSMax's s multiplies, [B, T] float32.
    """

    i: Tensor
    j: Tensor
    real: Tensor | None
    past: int
    cos: Tensor | None = None
    sin: Tensor | None = None
    n: Tensor | None = None

    def visible(self, first: int, last: int, window: int | None, strict: bool) -> Tensor:
        """[B, last − first, S]: the keys that these queries see, earlier ones alone if strict."""
        distance = self.i[:, first:last, None] - self.j[:, None, :]
        seen = distance > 0 if strict else distance >= 0
        if window is not None:
            seen = seen & (distance < window)
        if self.real is None:
            return seen
        seen = seen & self.real[:, None, :]
        if strict:
            return seen
        # Padding sees itself, or it would be NaN and its cached values would reach the others as 0 · NaN.
        column = torch.arange(self.j.shape[1], device=self.j.device)
        row = self.past + torch.arange(first, last, device=self.j.device)
        return seen | (row[:, None] == column)


class SSScaleRMSNorm(nn.Module):
    """y = x / sqrt(mean(x²) + ε) · w"""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), self.weight, self.eps)


def alibi_slopes(num_heads: int, device: torch.device) -> Tensor:
    """m_h = 2^(−8h / N), interleaved where N is no power of two   (arXiv:2108.12409, Section 3)"""
    power = 1 << (num_heads.bit_length() - 1)
    head = torch.arange(num_heads, device=device, dtype=torch.float32)
    return torch.exp2(-8 / power * torch.where(head < power, head + 1, head - power + 0.5))


class FIRE(nn.Module):
    """MLP(ψ(i − j) / ψ(max(i, |L_mult · L0|))), ψ(x) = ln(|c| · x + 1)   (arXiv:2310.04418, Eqs. 6 and 16)"""

    def __init__(self, num_heads: int) -> None:
        super().__init__()
        self.c = nn.Parameter(torch.full((1,), 0.1))
        self.length_multiplier = nn.Parameter(torch.ones(1))
        self.w1 = nn.Parameter(torch.empty(FIRE_HIDDEN, 1).uniform_(-1, 1))
        self.b1 = nn.Parameter(torch.empty(FIRE_HIDDEN).uniform_(-1, 1))
        bound = FIRE_HIDDEN**-0.5
        self.w2 = nn.Parameter(torch.empty(num_heads, FIRE_HIDDEN).uniform_(-bound, bound))
        self.b2 = nn.Parameter(torch.empty(num_heads).uniform_(-bound, bound))

    def forward(self, i: Tensor, j: Tensor) -> Tensor:
        """i: [B, Q], j: [B, S] → [B, N, Q, S] float32"""
        c, multiplier, w1, b1, w2, b2 = (
            p.float() for p in (self.c, self.length_multiplier, self.w1[:, 0], self.b1, self.w2, self.b2)
        )
        threshold = (multiplier * FIRE_LENGTH).abs()
        norm = ((c * torch.maximum(i.float(), threshold)).abs() + 1).log() + FIRE_EPS
        x = ((c * (i[:, :, None] - j[:, None, :])).abs() + 1).log() / norm[..., None]
        hidden = (x[..., None] * w1 + b1).relu()
        return (hidden @ w2.T + b2).movedim(-1, 1)


class AttentionCore(nn.Module):
    """q, k, v → o [B, N, T, H]; the learned numbers of the core are its parameters."""

    def __init__(self, config: SSScaleConfig) -> None:
        super().__init__()
        attention, heads = config.attention, config.num_attention_heads
        self.kind, self.method = attention["core"], config.position["method"]
        self.window, self.remainder = config.position["window"], attention["remainder"]
        self.scale = config.width["attention_scale"] or config.head_dim**-0.5
        self.heads = heads
        self.s: nn.Parameter | float = attention["ssmax_scale"]
        self.b: nn.Parameter | None = None
        if self.kind == "ssmax" and attention["ssmax"] != "fixed":
            self.s = nn.Parameter(torch.full((heads,), float(attention["ssmax_scale"])))
        if self.kind == "ssmax" and attention["ssmax"] in ("bias", "pn"):
            self.b = nn.Parameter(torch.full((heads,), float(attention.get("ssmax_bias", 0.0))))
        if self.method == "fire":
            self.bias = FIRE(heads)

    def query_factor(self, batch: Batch) -> Tensor | None:
        """s ln n + b (arXiv:2501.19399, Eqs. 2 to 4): [B, N, T, 1] float32"""
        if batch.n is None:
            return None
        s = self.s.float()[:, None] if isinstance(self.s, Tensor) else self.s
        factor = s * batch.n[:, None, :].expand(-1, self.heads, -1)
        if self.b is not None:
            factor = factor + self.b.float()[:, None]
        return factor[..., None]

    def forward(self, q: Tensor, k: Tensor, v: Tensor, batch: Batch) -> Tensor:
        repeats = q.shape[1] // k.shape[1]
        k, v = (x.repeat_interleave(repeats, 1) for x in (k, v))
        length, keys = q.shape[2], k.shape[2]
        biased = self.method in ("alibi", "fire")
        if self.kind != "stickbreaking" and not biased:
            whole = self.window is None or keys <= self.window
            if whole and batch.real is None and (batch.past == 0 or length == 1):
                return F.scaled_dot_product_attention(q, k, v, is_causal=length > 1, scale=self.scale)
        inner = FIRE_HIDDEN if self.method == "fire" else 1
        rows = max(1, TILE_ELEMENTS // (q.shape[0] * q.shape[1] * keys * inner))
        parts = []
        for first in range(0, length, rows):
            last = min(first + rows, length)
            part = q[:, :, first:last]
            visible = batch.visible(first, last, self.window, self.kind == "stickbreaking")[:, None]
            if self.kind == "stickbreaking":
                parts.append(self.break_stick(part, k, v, visible, first + batch.past))
            elif biased:
                parts.append(self.biased(part, k, v, visible, batch.i[:, first:last], batch.j))
            else:
                parts.append(F.scaled_dot_product_attention(part, k, v, attn_mask=visible, scale=self.scale))
        return torch.cat(parts, 2)

    def biased(self, q: Tensor, k: Tensor, v: Tensor, visible: Tensor, i: Tensor, j: Tensor) -> Tensor:
        """softmax(scale · q·k + bias) v in float32"""
        z = q.float() @ k.float().transpose(-1, -2) * self.scale
        if self.method == "fire":
            z = z + self.bias(i, j)
        else:
            distance = (i[:, :, None] - j[:, None, :]).float()
            z = z - alibi_slopes(self.heads, q.device)[:, None, None] * distance[:, None]
        return (z.masked_fill(~visible, -torch.inf).softmax(-1) @ v.float()).to(q.dtype)

    def break_stick(self, q: Tensor, k: Tensor, v: Tensor, visible: Tensor, own: int) -> Tensor:
        """A_ij = β_ij Π_{i<k<j} (1 − β_kj), β = σ(scale · q·k), strictly earlier keys   (arXiv:2410.17980, Eq. 5)

        With the remainder, what is left of the stick goes to the query's own value (Eq. 13), from column `own` on.
        """
        z = q.float() @ k.float().transpose(-1, -2) * self.scale
        kept = F.logsigmoid(-z).masked_fill(~visible, 0.0)
        # From the near end on, with a zero for it: subtracting a key's own share from an inclusive sum would cancel.
        spent = F.pad(kept.flip(-1).cumsum(-1).flip(-1), (0, 1))
        weights = (F.logsigmoid(z) + spent[..., 1:]).exp().masked_fill(~visible, 0.0)
        o = weights @ v.float()
        if self.remainder:
            o = o + spent[..., :1].exp() * v[:, :, own : own + q.shape[2]].float()
        return o.to(q.dtype)


def rotate(x: Tensor, batch: Batch, factor: Tensor | None = None) -> Tensor:
    """x [B, N, T, H], turned by its positions (halves are pairs) and times `factor`, in float32, rounded once."""
    if batch.cos is None and factor is None:
        return x
    y = x.float()
    if batch.cos is not None and batch.sin is not None:
        cos, sin = batch.cos[:, None], batch.sin[:, None]
        a, b = y.chunk(2, -1)
        y = torch.cat((a * cos - b * sin, b * cos + a * sin), -1)
    return (y if factor is None else y * factor).to(x.dtype)


class Attention(nn.Module):
    """W_o core(rotate(W_q x, W_k x), W_v x), W_q, W_k and W_v one matrix."""

    def __init__(self, config: SSScaleConfig, layer: int) -> None:
        super().__init__()
        self.layer, self.head_dim = layer, config.head_dim
        self.sizes = (config.num_attention_heads, config.num_key_value_heads, config.num_key_value_heads)
        self.qkv = nn.Linear(config.hidden_size, sum(self.sizes) * self.head_dim, bias=False)
        self.out = nn.Linear(config.num_attention_heads * self.head_dim, config.hidden_size, bias=False)
        self.core = AttentionCore(config)

    def forward(self, x: Tensor, batch: Batch, cache: Cache | None) -> Tensor:
        qkv = self.qkv(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        q, k, v = qkv.split(self.sizes, 1)
        q, k = rotate(q, batch, self.core.query_factor(batch)), rotate(k, batch)
        if cache is not None:
            k, v = cache.update(k, v, self.layer)
        return self.out(self.core(q, k, v, batch).transpose(1, 2).flatten(2))


class SwiGLU(nn.Module):
    """W_down (silu(W_gate x) ⊙ W_up x), W_gate and W_up one matrix."""

    def __init__(self, config: SSScaleConfig) -> None:
        super().__init__()
        self.gate_up = nn.Linear(config.hidden_size, 2 * config.intermediate_size, bias=False)
        self.down = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, -1)
        return self.down(F.silu(gate) * up)


class Block(nn.Module):
    """h = x + m · attention(norm(x)); y = h + m · mlp(norm(h))"""

    def __init__(self, config: SSScaleConfig, layer: int) -> None:
        super().__init__()
        self.multiplier = config.width["residual_multiplier"]
        self.attention_norm = SSScaleRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.attention = Attention(config, layer)
        self.mlp_norm = SSScaleRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = SwiGLU(config)

    def forward(self, x: Tensor, batch: Batch, cache: Cache | None) -> Tensor:
        x = x + self.multiplier * self.attention(self.attention_norm(x), batch, cache)
        return x + self.multiplier * self.mlp(self.mlp_norm(x))


class SSScaleForCausalLM(PreTrainedModel, GenerationMixin):
    """The decoder with its head. Texts of a batch may be padded on either side; attention_mask says where."""

    config_class = SSScaleConfig
    base_model_prefix = "decoder"
    _no_split_modules = ["Block"]  # noqa: RUF012
    _supports_sdpa = True
    _supports_cache_class = True

    def __init__(self, config: SSScaleConfig) -> None:
        super().__init__(config)
        self.embedding = nn.Embedding(config.vocab_size, config.hidden_size)
        if config.attention["core"] == "ssmax" and config.attention["ssmax"] == "pn":
            self.pn = nn.Parameter(torch.ones(config.max_position_embeddings))
        self.blocks = nn.ModuleList(Block(config, layer) for layer in range(config.num_hidden_layers))
        self.norm = SSScaleRMSNorm(config.hidden_size, config.rms_norm_eps)
        if not config.tie_word_embeddings:
            self.head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.embedding

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.embedding = value

    def get_output_embeddings(self) -> nn.Module | None:
        return getattr(self, "head", None)  # a tied model has none: it reads the embedding

    def set_output_embeddings(self, new_embeddings: nn.Module) -> None:
        self.head = new_embeddings

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int = 0,
        final_length: int | None = None,
        return_dict: bool | None = None,
    ) -> CausalLMOutputWithPast | tuple[Any, ...]:
        """Logits [B, T, vocab_size], and with labels (−100: none) the mean loss of each token's successor.

        attention_mask: [B, cached tokens and T], 0 for padding. token_type_ids: ignored, the model has no token types.
        logits_to_keep: of the last tokens only; 0: of all.
        final_length: under dynamic_ntk, the tokens (padding counted) that cached texts are to reach; `generate` fills it in.
        """
        use_cache = self.config.use_cache if use_cache is None else use_cache
        if use_cache and past_key_values is None and not self.training:
            past_key_values = DynamicCache()
        batch = self.make_batch(input_ids, attention_mask, past_key_values, final_length)
        width = self.config.width
        x = self.embedding(input_ids) * width["embedding_multiplier"]
        for block in self.blocks:
            x = block(x, batch, past_key_values)
        x = self.norm(x[:, -logits_to_keep:]) / width["logits_divisor"]
        logits = F.linear(x, self.embedding.weight) if self.config.tie_word_embeddings else self.head(x)
        loss = None
        if labels is not None:
            loss = F.cross_entropy(logits[:, :-1].float().flatten(0, 1), labels[:, 1:].flatten())
        result = CausalLMOutputWithPast(loss=loss, logits=logits, past_key_values=past_key_values)
        return result.to_tuple() if return_dict is False else result

    def make_batch(
        self, input_ids: Tensor, attention_mask: Tensor | None, cache: Cache | None, final_length: int | None
    ) -> Batch:
        past = cache.get_seq_length() if cache is not None else 0
        total, device = past + input_ids.shape[1], input_ids.device
        real = None
        j = torch.arange(total, device=device)[None]
        if attention_mask is not None:
            if attention_mask.shape != (input_ids.shape[0], total):
                shape = tuple(attention_mask.shape)
                raise ValueError(f"attention_mask must be [{input_ids.shape[0]}, {total}], got {shape}")
            if not attention_mask.all():
                real = attention_mask.bool()
                j = (real.cumsum(-1) - 1).clamp(min=0)
        batch = Batch(j[:, past:], j, real, past)
        if self.config.position["method"] == "rope":
            batch.cos, batch.sin = self.rope_tables(batch, total if final_length is None else final_length)
        if self.config.attention["core"] == "ssmax":
            window = self.config.position["window"]
            n = batch.i + 1 if window is None else (batch.i + 1).clamp(max=window)
            pn = getattr(self, "pn", None)
            batch.n = n.float().log() if pn is None else pn.float()[n.clamp(max=pn.numel()) - 1]
        return batch

    def rope_tables(self, batch: Batch, length: int) -> tuple[Tensor, Tensor]:
        """cos and sin of p · base^(−2k / H)   (arXiv:2104.09864, Eq. 15), base and p as `rope_scaling` says."""
        position, size = self.config.position, self.config.head_dim
        scaling, factor, base = position["rope_scaling"], position["rope_factor"], position["rope_base"]
        i = batch.i.float()
        if scaling == "linear":
            i = i / factor
        elif scaling == "ntk":
            base = base * factor ** (size / (size - 2))
        elif scaling == "dynamic_ntk":
            lengths = torch.full((len(i), 1), float(length), device=i.device, dtype=torch.float64)
            if batch.real is not None:
                lengths -= (~batch.real).sum(-1, keepdim=True)
            excess = (lengths / position["train_length"]).clamp(min=1.0) - 1
            base = (base * (factor * excess + 1) ** (size / (size - 2))).float()[..., None]
        exponent = torch.arange(0, size, 2, device=i.device, dtype=torch.float32) / size
        angle = i[..., None] * base**-exponent
        return angle.cos(), angle.sin()

    def generate(self, inputs: Tensor | None = None, generation_config: Any = None, **kwargs: Any) -> Any:
        """transformers' generate. Under dynamic_ntk a text is turned, from its first token on, for the length it may reach:
        what was cached for another base could not be told from what was not.
        """
        if self.config.position["rope_scaling"] == "dynamic_ntk" and kwargs.get("final_length") is None:
            config = generation_config or self.generation_config
            given = kwargs.get("input_ids") if inputs is None else inputs
            prompt = 1 if given is None else given.shape[1]
            new = kwargs.get("max_new_tokens", config.max_new_tokens)
            length = kwargs.get("max_length", config.max_length if generation_config else None)
            if new is None and length is not None:
                kwargs["final_length"] = max(length, prompt + 1)
            else:
                kwargs["final_length"] = prompt + (DEFAULT_NEW_TOKENS if new is None else new)
        return super().generate(inputs, generation_config, **kwargs)

    def prepare_inputs_for_generation(
        self,
        input_ids: Tensor,
        past_key_values: Cache | None = None,
        attention_mask: Tensor | None = None,
        use_cache: bool | None = None,
        final_length: int | None = None,
        logits_to_keep: int | None = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        past = past_key_values.get_seq_length() if past_key_values is not None else 0
        return {
            "input_ids": input_ids[:, past:],
            "attention_mask": attention_mask,
            "past_key_values": past_key_values,
            "use_cache": use_cache,
            "final_length": final_length,
            "logits_to_keep": 1,
        }
