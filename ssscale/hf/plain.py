"""Conversion to and from models that transformers has its own classes for: Llama's attention with rotary positions.

`llama` is LlamaForCausalLM. `mistral` is MistralForCausalLM, which also has a sliding window. `granite` is
GraniteForCausalLM, which also has the four multipliers of width transfer. These models can be served and fine-tuned
without `trust_remote_code`.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ssscale.config.schema import Config, ModelConfig
from ssscale.errors import UserError
from ssscale.model.positions.rope import RoPE, RopeScaling

ARCHITECTURES = {"llama": "LlamaForCausalLM", "mistral": "MistralForCausalLM", "granite": "GraniteForCausalLM"}
IMPORTED = tuple(ARCHITECTURES)  # model types that can be imported
# What related families have and this decoder does not.
LACKING = {
    "qwen2": "biases of the query, key and value projections",
    "qwen3": "norms of queries and keys",
    "smollm3": "layers without rotary positions (no_rope_layers)",
    "olmo2": "norms of queries and keys, and norms after attention and MLP",
    "phi3": "its own order of fused weights",
    "gemma": "norms by 1 + w and a GELU",
    "gemma2": "norms by 1 + w, a GELU and soft caps",
    "gemma3_text": "norms by 1 + w, a GELU, and windows in some layers only (layer_types)",
    "ministral": "windows in some layers only (layer_types)",
    "starcoder2": "layer norms with biases and a GELU",
    "mixtral": "experts",
    "qwen2_moe": "experts",
    "qwen3_moe": "experts",
    "granitemoe": "experts",
}
# What transformers takes for a key that config.json lacks, where families differ.
DEFAULT_KV_HEADS = {"mistral": 8}  # others: num_attention_heads
DEFAULT_WINDOW = {"mistral": 4096}


def check_exportable(model: ModelConfig, family: str) -> None:
    """Raises UserError if the family cannot represent the model."""
    other = "use format=ssscale, which has all of it"
    for name, mixer in model.used.items():
        if not mixer.plain:
            raise UserError(f"format={family}: model.mixers has {name}, which transformers has no model for: {other}")
    place = model.place
    if not isinstance(place, RoPE) or place.scaling is RopeScaling.dynamic_ntk:
        what = f"model.position.method={place.name}" + (" with scaling=dynamic_ntk" if isinstance(place, RoPE) else "")
        raise UserError(f"format={family} has rotary positions of a fixed base only, and this model {what}: {other}")
    if model.position.window is not None and family != "mistral":
        raise UserError(
            f"format={family} has no model.position.window={model.position.window}: use format=mistral or format=ssscale"
        )
    width = model.width
    scaled = [
        width.embedding_multiplier != 1.0 and "model.width.embedding_multiplier",
        width.residual_multiplier != 1.0 and "model.width.residual_multiplier",
        width.attention_scale not in (None, model.head_size**-0.5) and "model.width.attention_scale",
        model.logits_divisor != 1.0 and "model.width.logits_divisor",
    ]
    first = next(filter(None, scaled), None)
    if family != "granite" and first:
        better = "granite" if model.position.window is None else "ssscale"
        raise UserError(f"format={family} has no {first}, which this model sets: use format={better}")


def family_config(config: Config, family: str, dtype: str) -> dict[str, Any]:
    """Returns config.json without the token ids. The model must pass `check_exportable`."""
    model, place = config.model, config.model.place
    linear = place.scaling is RopeScaling.linear
    base = place.base
    if place.scaling is RopeScaling.ntk:
        base *= place.factor ** (model.head_size / (model.head_size - 2))
    content = {
        "architectures": [ARCHITECTURES[family]],
        "model_type": family,
        "dtype": dtype,
        "vocab_size": model.vocab_size,
        "hidden_size": model.hidden_size,
        "intermediate_size": model.ffn_hidden_size,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_heads,
        "num_key_value_heads": model.kv_heads,
        "head_dim": model.head_size,
        "hidden_act": "silu",
        "max_position_embeddings": config.data.length,
        "initializer_range": model.init_std,
        "rms_norm_eps": model.norm_eps,
        "tie_word_embeddings": model.tie_embeddings,
        "rope_theta": base,
        "rope_scaling": {"rope_type": "linear", "factor": place.factor} if linear else None,
    }
    if family == "mistral":
        return content | {"sliding_window": model.position.window}
    content |= {"attention_bias": False, "mlp_bias": False}
    if family == "granite":
        width = model.width
        content |= {
            "embedding_multiplier": width.embedding_multiplier,
            "residual_multiplier": width.residual_multiplier,
            "attention_multiplier": width.attention_scale or model.head_size**-0.5,
            "logits_scaling": model.logits_divisor,
        }
    return content


def family_parts(model: ModelConfig) -> dict[str, list[tuple[str, int]]]:
    """Maps each of our weights to the family's weights that are concatenated to it, with their numbers of rows."""
    q, kv, hidden = model.num_heads * model.head_size, model.kv_heads * model.head_size, model.hidden_size
    found = {"embedding.weight": [("model.embed_tokens.weight", model.vocab_size)]}
    for layer in range(model.num_layers):
        ours, theirs = f"blocks.{layer}", f"model.layers.{layer}"
        projections = [(f"{theirs}.self_attn.{name}_proj.weight", rows) for name, rows in zip("qkv", (q, kv, kv))]
        gates = [(f"{theirs}.mlp.{name}_proj.weight", model.ffn_hidden_size) for name in ("gate", "up")]
        found |= {
            f"{ours}.attention_norm.weight": [(f"{theirs}.input_layernorm.weight", hidden)],
            f"{ours}.attention.qkv.weight": projections,
            f"{ours}.attention.out.weight": [(f"{theirs}.self_attn.o_proj.weight", hidden)],
            f"{ours}.mlp_norm.weight": [(f"{theirs}.post_attention_layernorm.weight", hidden)],
            f"{ours}.mlp.gate_up.weight": gates,
            f"{ours}.mlp.down.weight": [(f"{theirs}.mlp.down_proj.weight", hidden)],
        }
    found["norm.weight"] = [("model.norm.weight", hidden)]
    if not model.tie_embeddings:
        found["head.weight"] = [("lm_head.weight", model.vocab_size)]
    return found


def to_family(weights: Iterator[tuple[str, Tensor]], model: ModelConfig) -> Iterator[tuple[str, Tensor]]:
    """Converts our weights, (name, tensor), to those of the family."""
    parts = family_parts(model)
    for name, weight in weights:
        pieces = weight.split([rows for _, rows in parts[name]])
        yield from ((theirs, piece.contiguous()) for (theirs, _), piece in zip(parts[name], pieces, strict=True))


class Joined:
    """Presents open files of the family's weights under one of our names."""

    def __init__(self, files: Mapping[str, Any], parts: list[tuple[str, int]]) -> None:
        self.files, self.parts = files, parts

    def get_tensor(self, name: str) -> Tensor:
        return torch.cat([self.files[theirs].get_tensor(theirs) for theirs, _ in self.parts])


def from_family(files: Mapping[str, Any], model: ModelConfig, folder: Path) -> dict[str, Any]:
    """Maps our names to weights read from the family's files. Weights that are missing are left out.

    files: the family's names with their open files. Raises UserError for an unknown name.
    """
    parts = family_parts(model)
    known = {name for pieces in parts.values() for name, _ in pieces}
    known.add("lm_head.weight")  # some writers store the embedding twice
    for name in files:
        if name not in known and not name.endswith("rotary_emb.inv_freq"):
            raise UserError(f"{folder} is not whole: only the folder has {name}")
    whole = {ours: pieces for ours, pieces in parts.items() if all(name in files for name, _ in pieces)}
    return {ours: Joined(files, pieces) for ours, pieces in whole.items()}


def native_tree(content: dict[str, Any], file: object) -> dict[str, Any]:
    """Returns the section `model` for the config.json of a model type in IMPORTED.

    A key that is missing has the value that transformers gives it. Raises UserError, which names the key, for what this
    decoder does not have; LookupError, TypeError or ValueError if config.json is broken.
    """
    kind = content["model_type"]
    _check_importable(content, file)
    heads, hidden = content["num_attention_heads"], content["hidden_size"]
    tree: dict[str, Any] = {
        "num_layers": content["num_hidden_layers"],
        "hidden_size": hidden,
        "ffn_hidden_size": content["intermediate_size"],
        "num_heads": heads,
        "num_kv_heads": content.get("num_key_value_heads", DEFAULT_KV_HEADS.get(kind, heads)),
        "head_dim": content.get("head_dim") or hidden // heads,
        "vocab_size": content["vocab_size"],
        "tie_embeddings": content.get("tie_word_embeddings", False),
        "norm_eps": content.get("rms_norm_eps", 1e-6),
        "init_std": content.get("initializer_range", 0.02),
        "position": {"method": "rope", "rope": _rope(content, file), "window": _window(content, file)},
    }
    if kind == "granite":
        tree["width"] = {
            "embedding_multiplier": content.get("embedding_multiplier", 1.0),
            "residual_multiplier": content.get("residual_multiplier", 1.0),
            "attention_scale": content.get("attention_multiplier", 1.0),
            "logits_divisor": content.get("logits_scaling", 1.0),
        }
    return tree


def _check_importable(content: dict[str, Any], file: object) -> None:
    """Raises UserError for a key whose value this decoder does not have."""
    for key in ("attention_bias", "mlp_bias"):
        if content.get(key):
            raise UserError(f"{file}: {key}=true, and this decoder has no biases")
    if content.get("hidden_act", "silu") != "silu":
        raise UserError(f"{file}: hidden_act={content['hidden_act']!r}, and this decoder has silu only")
    if content.get("quantization_config") is not None:
        raise UserError(f"{file}: quantization_config is set, and only weights that are not quantized are imported")
    if len(set(content.get("layer_types") or ())) > 1:
        raise UserError(f"{file}: layer_types differ, and in this decoder all layers have the same window")
    for key in ("bos_token_id", "eos_token_id"):
        if type(content.get(key)) is not int:
            raise UserError(
                f"{file}: {key}={json.dumps(content.get(key))}: set it to the one token that "
                f"{'begins' if key == 'bos_token_id' else 'ends'} a document"
            )


def _window(content: dict[str, Any], file: object) -> int | None:
    """Returns the number of keys that a query attends to, its own included. transformers counts in the same way."""
    kind = content["model_type"]
    window: int | None = content.get("sliding_window", DEFAULT_WINDOW.get(kind))
    if window is not None and kind != "mistral":
        raise UserError(
            f"{file}: sliding_window={window}, which transformers does not apply in a model of type {kind}: "
            "set it to null, or model_type to mistral"
        )
    return window


def _rope(content: dict[str, Any], file: object) -> dict[str, Any]:
    """Reads the options of RoPE from transformers 5 (`rope_parameters`) or 4 (`rope_theta`, `rope_scaling`).

    `dynamic` is our dynamic_ntk with L = max_position_embeddings: both replace base by base · α^(H / (H − 2)) with
    α = f · S / L − (f − 1) for S > L tokens.
    """
    section = "rope_parameters" if content.get("rope_parameters") else "rope_scaling"
    given = content.get(section) or {}
    kind = given.get("rope_type", given.get("type", "default"))
    rotated = given.get("partial_rotary_factor", content.get("partial_rotary_factor"))
    if rotated not in (None, 1):
        raise UserError(f"{file}: partial_rotary_factor={rotated}, and this decoder rotates whole heads only")
    found = {"base": float(given.get("rope_theta", content.get("rope_theta", 10_000.0)))}
    if kind == "default":
        return found
    if kind not in ("linear", "dynamic"):
        raise UserError(f"{file}: {section}.rope_type={kind!r} is not imported; default, linear and dynamic are")
    factor = float(given["factor"])
    if factor == 1.0 and kind == "linear":
        return found
    if kind == "linear":
        return found | {"scaling": "linear", "factor": factor}
    return found | {"scaling": "dynamic_ntk", "factor": factor, "train_length": content["max_position_embeddings"]}
