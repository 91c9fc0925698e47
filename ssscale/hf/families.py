"""The model families of transformers that an export can name, and what each takes. Needs no torch."""

from dataclasses import dataclass

from ssscale.config.schema import ModelConfig
from ssscale.errors import UserError
from ssscale.model.positions.rope import RoPE, RopeScaling


@dataclass(frozen=True)
class Family:
    """A class of transformers, and what it has beside Llama's.

    multipliers: the four multipliers of width transfer. window: a sliding window in all layers. qkv_bias, qk_norm: as the
    keys of `model`; the family has no models without them. head_dim: whether its configuration has this key. Without it,
    transformers still reads the key, and other programs do not.
    """

    architecture: str
    multipliers: bool = False
    window: bool = False
    qkv_bias: bool = False
    qk_norm: bool = False
    head_dim: bool = True


FAMILIES = {
    "llama": Family("LlamaForCausalLM"),
    "mistral": Family("MistralForCausalLM", window=True),
    "granite": Family("GraniteForCausalLM", multipliers=True),
    "qwen2": Family("Qwen2ForCausalLM", qkv_bias=True, head_dim=False),
    "qwen3": Family("Qwen3ForCausalLM", qk_norm=True),
}
# What related families have and this decoder does not.
LACKING = {
    "smollm3": "layers without rotary positions (no_rope_layers)",
    "llama4_text": "experts (num_local_experts), and layers without rotary positions (no_rope_layers)",
    "olmo2": "norms of all of q and k, and norms after attention and MLP",
    "olmo3": "norms of all of q and k, norms after attention and MLP, and windows in some layers only (layer_types)",
    "exaone4": "norms after attention and MLP, and windows in some layers only (layer_types)",
    "phi3": "its own order of fused weights",
    "gemma": "norms by 1 + w and a GELU",
    "gemma2": "norms by 1 + w, a GELU and soft caps",
    "gemma3_text": "norms by 1 + w, a GELU, and windows in some layers only (layer_types)",
    "ministral": "windows in some layers only (layer_types)",
    "starcoder2": "layer norms with biases and a GELU",
    "gpt_oss": "experts (num_local_experts), attention sinks, and windows in some layers only (layer_types)",
    "mixtral": "experts (num_local_experts)",
    "qwen2_moe": "experts (num_experts)",
    "qwen3_moe": "experts (num_experts)",
    "qwen3_next": "experts (num_experts), and linear attention in some layers (layer_types)",
    "deepseek_v3": "experts (n_routed_experts), and compressed keys and values (kv_lora_rank)",
    "granitemoe": "experts (num_local_experts)",
}


def check_exportable(model: ModelConfig, family: str) -> None:
    """Raises UserError if the family cannot represent the model."""
    reason = _mismatch(model, family)
    if reason is not None:
        fitting = [name for name in FAMILIES if _mismatch(model, name) is None]
        raise UserError(
            f"format={family} {reason}: use {' or '.join(f'format={name}' for name in [*fitting, 'ssscale'])}"
        )


def _mismatch(model: ModelConfig, name: str) -> str | None:
    """Returns what the family lacks or what the model lacks, as the end of a sentence; None if they fit."""
    family, place, width = FAMILIES[name], model.place, model.width
    for mixer in model.used.values():
        if not mixer.plain:
            return f"has no layers of {mixer.name}, which model.mixers has; transformers has no model with them"
    if not isinstance(place, RoPE):
        return f"has rotary positions, and this model has model.position.method={place.name}"
    if place.scaling is RopeScaling.dynamic_ntk:
        return f"has no model.position.rope.scaling={place.scaling.value}, which this model sets"
    if model.position.window is not None and not family.window:
        return f"has no model.position.window={model.position.window}"
    scaled = {
        "embedding_multiplier": width.embedding_multiplier != 1.0,
        "residual_multiplier": width.residual_multiplier != 1.0,
        "attention_scale": width.attention_scale not in (None, model.head_size**-0.5),
        "logits_divisor": model.logits_divisor != 1.0,
    }
    for key in scaled:
        if scaled[key] and not family.multipliers:
            return f"has no model.width.{key}, which this model sets"
    for key in ("qkv_bias", "qk_norm"):
        if getattr(model, key) and not getattr(family, key):
            return f"has no model.{key}, which this model sets"
        if getattr(family, key) and not getattr(model, key):
            return f"needs model.{key}=true, and this model has {key}=false"
    if not family.head_dim and model.head_size * model.num_heads != model.hidden_size:
        return f"has heads of hidden_size / num_heads dimensions, and this model has model.head_dim={model.head_dim}"
    return None
