"""The model in plain torch for transformers. This file is saved with the weights and needs only torch and transformers.

The weights have the names and shapes of the trained model, without the padding of the vocabulary. `ssscale.hf.code`
inserts the functions of the model's mixers. x: [B, T, D]; q: [B, N, T, H]; k, v: [B, K, S, H], S: cached and new
tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import GenerationMixin, PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache
from transformers.modeling_outputs import CausalLMOutputWithPast

from .configuration_ssscale import SSScaleConfig

FIRE_HIDDEN, FIRE_LENGTH, FIRE_EPS = 32, 512.0, 1e-6
TILE_ELEMENTS = 1 << 24  # elements of temporaries per block of queries, if no fused kernel applies
DEFAULT_NEW_TOKENS = 20  # the default of transformers if neither max_new_tokens nor max_length is given


@dataclass
class Batch:
    """What all layers share in a forward pass.

    i: [B, T] and j: [B, S] positions of queries and keys. real: [B, S] False for padding, or None. past: number of
    cached tokens. cos, sin: [B, T, H / 2] float32. own: what the layers of each mixer share, by its name.
    """

    i: Tensor
    j: Tensor
    real: Tensor | None
    past: int
    cos: Tensor | None = None
    sin: Tensor | None = None
    own: dict[str, Any] = field(default_factory=dict)

    def visible(self, first: int, last: int, window: int | None, strict: bool) -> Tensor:
        """Returns the mask [B, last − first, S] of keys that these queries attend to; only earlier keys if `strict`."""
        distance = self.i[:, first:last, None] - self.j[:, None, :]
        seen = distance > 0 if strict else distance >= 0
        if window is not None:
            seen = seen & (distance < window)
        if self.real is None:
            return seen
        seen = seen & self.real[:, None, :]
        if strict:
            return seen
        # Padding attends to itself, or it would be NaN and its cached values would reach other tokens as 0 · NaN.
        column = torch.arange(self.j.shape[1], device=self.j.device)
        return seen | (column[self.past + first : self.past + last, None] == column)


class SSScaleRMSNorm(nn.Module):
    """y = x / sqrt(mean(x²) + ε) · w"""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), self.weight, self.eps)


class ALiBi:
    """bias = −m_h · (i − j)   (arXiv:2108.12409, Eq. 1), m_h = 2^(−8h / N); Section 3 if N is not a power of two."""

    inner = 1  # numbers per pair of positions

    def __init__(self, layer: Attention) -> None:
        self.num_heads = layer.sizes[0]

    def __call__(self, i: Tensor, j: Tensor) -> Tensor:
        """i: [B, Q], j: [B, S] → [B, N, Q, S] float32"""
        power = 1 << (self.num_heads.bit_length() - 1)
        head = torch.arange(self.num_heads, device=i.device, dtype=torch.float32)
        slopes = torch.exp2(-8 / power * torch.where(head < power, head + 1, head - power + 0.5))
        return -slopes[:, None, None] * (i[:, :, None] - j[:, None, :]).float()[:, None]


class FIRE:
    """MLP(ψ(i − j) / ψ(max(i, |L_mult · L0|))), ψ(x) = ln(|c| · x + 1)   (arXiv:2310.04418, Eqs. 6 and 16)"""

    inner = FIRE_HIDDEN

    def __init__(self, layer: Attention) -> None:
        self.layer = layer

    def __call__(self, i: Tensor, j: Tensor) -> Tensor:
        """i: [B, Q], j: [B, S] → [B, N, Q, S] float32"""
        learned = self.layer.position_weights
        names = ("c", "length_multiplier", "w1", "b1", "w2", "b2")
        c, multiplier, w1, b1, w2, b2 = (getattr(learned, name).float() for name in names)
        threshold = (multiplier * FIRE_LENGTH).abs()
        norm = ((c * torch.maximum(i.float(), threshold)).abs() + 1).log() + FIRE_EPS
        x = ((c * (i[:, :, None] - j[:, None, :])).abs() + 1).log() / norm[..., None]
        hidden = (x[..., None] * w1[:, 0] + b1).relu()
        return (hidden @ w2.T + b2).movedim(-1, 1)


BIASES: dict[str, Callable[..., Any]] = {"alibi": ALiBi, "fire": FIRE}


class Learned(nn.Module):
    """Learned tensors by name, filled with their start values."""

    def __init__(self, config: SSScaleConfig, prefix: str) -> None:
        super().__init__()
        for name, shape, start in config.learned:
            if name.startswith(prefix + "."):
                self.register_parameter(name[len(prefix) + 1 :], nn.Parameter(torch.full(shape, float(start))))


def fused(q: Tensor, k: Tensor, v: Tensor, batch: Batch, layer: Attention) -> Tensor | None:
    """Computes softmax attention in torch's kernel. Returns None if its causal mask does not fit the batch."""
    k, v = grouped(q, k, v)
    whole = layer.window is None or k.shape[2] <= layer.window
    if whole and batch.real is None and (batch.past == 0 or q.shape[2] == 1):
        return F.scaled_dot_product_attention(q, k, v, is_causal=q.shape[2] > 1, scale=layer.scale)
    return None


def grouped(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Repeats the heads of k and v to match q."""
    repeats = q.shape[1] // k.shape[1]
    return k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)


def attend_in_tiles(
    run: Callable[..., Tensor],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    batch: Batch,
    layer: Attention,
    strict: bool = False,
    inner: int = 1,
) -> Tensor:
    """Calls run(q, k, v, visible, batch, layer, first) for blocks of queries, so that no [T, S] matrix is held whole.

    first: index of the first query of the block. visible: mask of the keys that each query attends to; only earlier
    ones if `strict`. inner: numbers that `run` holds per pair.
    """
    k, v = grouped(q, k, v)
    rows = max(1, TILE_ELEMENTS // (q.shape[0] * q.shape[1] * k.shape[2] * inner))
    parts = []
    for first in range(0, q.shape[2], rows):
        part = q[:, :, first : first + rows]
        visible = batch.visible(first, first + part.shape[2], layer.window, strict)[:, None]
        parts.append(run(part, k, v, visible, batch, layer, first))
    return torch.cat(parts, 2)


def biased(q: Tensor, k: Tensor, v: Tensor, visible: Tensor, batch: Batch, layer: Attention, first: int) -> Tensor:
    """softmax(scale · q·k + bias) v, computed in float32."""
    i = batch.i[:, first : first + q.shape[2]]
    z = q.float() @ k.float().transpose(-1, -2) * layer.scale
    z = z + layer.bias(i, batch.j)  # type: ignore[misc]
    return (z.masked_fill(~visible, -torch.inf).softmax(-1) @ v.float()).to(q.dtype)


@dataclass
class Part:
    """The functions of one mixer: mixing, the factor of q, and what all its layers share (see `Export`)."""

    mix: Callable[..., Tensor]
    factor: Callable[..., Tensor] | None = None
    prepare: Callable[..., Tensor] | None = None


# the model's mixers
MIXERS: dict[str, Part] = {}
# the end of the model's mixers


def rotate(x: Tensor, batch: Batch, turned: bool, factor: Tensor | None = None) -> Tensor:
    """Rotates x [B, N, T, H] (halves are pairs) and multiplies it by `factor` in float32; rounds once."""
    if not turned and factor is None:
        return x
    y = x.float()
    if turned and batch.cos is not None and batch.sin is not None:
        cos, sin = batch.cos[:, None], batch.sin[:, None]
        a, b = y.chunk(2, -1)
        y = torch.cat((a * cos - b * sin, b * cos + a * sin), -1)
    return (y if factor is None else y * factor).to(x.dtype)


class Attention(nn.Module):
    """y = W_o mix(rotate(W_q x, W_k x), W_v x). W_q, W_k and W_v are one matrix; `mix` is the layer's mixer."""

    def __init__(self, config: SSScaleConfig, layer: int) -> None:
        super().__init__()
        self.layer, self.head_dim = layer, config.head_dim
        self.name = config.mixers[layer % len(config.mixers)]
        self.part, self.options = MIXERS[self.name], config.mixer[self.name]
        placed = config.position["method"] in self.options["positions"]
        self.window = config.position["window"] if self.options["windowed"] else None
        self.scale = config.width["attention_scale"] or config.head_dim**-0.5
        self.rotates = placed and config.position["method"] == "rope"
        self.sizes = (config.num_attention_heads, config.num_key_value_heads, config.num_key_value_heads)
        self.qkv = nn.Linear(config.hidden_size, sum(self.sizes) * self.head_dim, bias=False)
        self.out = nn.Linear(config.num_attention_heads * self.head_dim, config.hidden_size, bias=False)
        self.weights = Learned(config, f"blocks.{layer}.attention.weights")
        self.position_weights = Learned(config, f"blocks.{layer}.attention.position_weights")
        bias = BIASES.get(config.position["method"]) if placed else None
        self.bias = bias(self) if bias else None

    def learned(self, name: str) -> Tensor | None:
        """Returns the mixer's weight of this name, or None."""
        return getattr(self.weights, name, None)

    def forward(self, x: Tensor, batch: Batch, cache: Cache | None) -> Tensor:
        qkv = self.qkv(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        q, k, v = qkv.split(self.sizes, 1)
        factor = self.part.factor(batch, self) if self.part.factor else None
        q, k = rotate(q, batch, self.rotates, factor), rotate(k, batch, self.rotates)
        if cache is not None:
            k, v = cache.update(k, v, self.layer)
        return self.out(self.part.mix(q, k, v, batch, self).transpose(1, 2).flatten(2))


class SwiGLU(nn.Module):
    """y = W_down (silu(W_gate x) ⊙ W_up x). W_gate and W_up are one matrix."""

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
    """The decoder with its head. Texts may be padded on either side; attention_mask marks the padding."""

    config_class = SSScaleConfig
    base_model_prefix = "decoder"
    _no_split_modules = ["Block"]  # noqa: RUF012
    _supports_sdpa = True
    _supports_cache_class = True

    def __init__(self, config: SSScaleConfig) -> None:
        super().__init__(config)
        self.embedding = nn.Embedding(config.vocab_size, config.hidden_size)
        learned = {name: Learned(config, f"shared.{name}") for name in config.mixers}
        self.shared = nn.ModuleDict({name: own for name, own in learned.items() if any(True for _ in own.parameters())})
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
        return getattr(self, "head", None)  # a tied model uses the embedding

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
        """Returns logits [B, T, vocab_size] and, with labels (−100: none), the mean loss of each token's successor.

        attention_mask: [B, cached + T], 0 for padding. token_type_ids: ignored. logits_to_keep: number of last tokens
        with logits; 0: all. final_length: for dynamic_ntk, the final number of tokens of cached texts, padding
        included; `generate` sets it. Raises ValueError if attention_mask has another shape.
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
        for name in dict.fromkeys(self.config.mixers):
            prepare = MIXERS[name].prepare
            batch.own[name] = prepare(batch, self) if prepare else None
        return batch

    def rope_tables(self, batch: Batch, length: int) -> tuple[Tensor, Tensor]:
        """Returns cos and sin of p · base^(−2k / H)   (arXiv:2104.09864, Eq. 15), base and p after scaling."""
        rope, size = self.config.position["rope"], self.config.head_dim
        scaling, factor, base = rope["scaling"], rope["factor"], rope["base"]
        i = batch.i.float()
        if scaling == "linear":
            i = i / factor
        elif scaling == "ntk":
            base = base * factor ** (size / (size - 2))
        elif scaling == "dynamic_ntk":
            lengths = torch.full((len(i), 1), float(length), device=i.device, dtype=torch.float64)
            if batch.real is not None:
                lengths -= (~batch.real).sum(-1, keepdim=True)
            excess = (lengths / rope["train_length"]).clamp(min=1.0) - 1
            base = (base * (factor * excess + 1) ** (size / (size - 2))).float()[..., None]
        exponent = torch.arange(0, size, 2, device=i.device, dtype=torch.float32) / size
        angle = i[..., None] * base**-exponent
        return angle.cos(), angle.sin()

    def generate(self, inputs: Tensor | None = None, generation_config: Any = None, **kwargs: Any) -> Any:
        """Calls transformers' generate. With dynamic_ntk, texts are rotated for their final length from the start."""
        rope = self.config.position.get("rope", {})
        if rope.get("scaling") == "dynamic_ntk" and kwargs.get("final_length") is None:
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
