"""Conversion to and from models that transformers has its own classes for: Llama's attention with rotary positions.

`ssscale/hf/families.py` lists them. These models can be served and fine-tuned without `trust_remote_code`.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ssscale.config.schema import Config, ModelConfig
from ssscale.errors import UserError
from ssscale.hf.families import FAMILIES
from ssscale.model.positions.rope import RoPE, RopeScaling
from ssscale.model.weight import projection_weights

# What transformers takes for a key that config.json lacks, where families differ.
DEFAULT_KV_HEADS = {"mistral": 8, "qwen2": 32, "qwen3": 32}  # others: num_attention_heads
DEFAULT_HEAD_DIM = {"qwen3": 128}  # others: hidden_size / num_attention_heads
DEFAULT_WINDOW = {"mistral": 4096, "qwen2": 4096, "qwen3": 4096}  # others: none
DEFAULT_FULL_LAYERS = 28  # max_window_layers of qwen2 and qwen3


def family_config(config: Config, family: str, dtype: str) -> dict[str, Any]:
    """Returns config.json without the token ids. The model must pass `check_exportable`."""
    model, place = config.model, config.model.place
    base = place.base
    if place.scaling is RopeScaling.ntk:
        base *= place.factor ** (model.head_size / (model.head_size - 2))
    content = {
        "architectures": [FAMILIES[family].architecture],
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
        "rope_scaling": _rope_scaling(place),
    }
    if family == "mistral":
        return content | {"sliding_window": model.position.window}
    if family == "qwen2":
        return content | {"use_sliding_window": False}
    if family == "qwen3":
        return content | {"use_sliding_window": False, "attention_bias": False}
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


def _rope_scaling(place: RoPE) -> dict[str, Any] | None:
    if place.scaling is RopeScaling.linear:
        return {"rope_type": "linear", "factor": place.factor}
    if place.scaling is RopeScaling.llama3:
        return {
            "rope_type": "llama3",
            "factor": place.factor,
            "low_freq_factor": place.low_freq_factor,
            "high_freq_factor": place.high_freq_factor,
            "original_max_position_embeddings": place.train_length,
        }
    return None


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
        for own, weight in projection_weights(model).items():
            name, kind = own.split("_")  # q_bias, q_norm, ...
            full = f"{name}_proj.bias" if kind == "bias" else f"{name}_norm.weight"
            found[f"{ours}.attention.projection_weights.{own}"] = [(f"{theirs}.self_attn.{full}", weight.shape[0])]
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
    """Returns the section `model` for the config.json of a model type in FAMILIES.

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
        "head_dim": content.get("head_dim", DEFAULT_HEAD_DIM.get(kind)) or hidden // heads,
        "vocab_size": content["vocab_size"],
        "tie_embeddings": content.get("tie_word_embeddings", False),
        "norm_eps": content.get("rms_norm_eps", 1e-6),
        "qkv_bias": FAMILIES[kind].qkv_bias,
        "qk_norm": FAMILIES[kind].qk_norm,
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
    kind = content["model_type"]
    if content.get("attention_bias") and kind != "qwen2":  # transformers does not read the key in a Qwen2
        raise UserError(
            f"{file}: attention_bias=true adds a bias to the output projection too, and this decoder has biases of "
            "queries, keys and values only"
        )
    if content.get("mlp_bias"):
        raise UserError(f"{file}: mlp_bias=true, and this decoder has no biases in the MLP")
    if content.get("hidden_act", "silu") != "silu":
        raise UserError(f"{file}: hidden_act={content['hidden_act']!r}, and this decoder has silu only")
    if content.get("quantization_config") is not None:
        raise UserError(f"{file}: quantization_config is set, and only weights that are not quantized are imported")
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
    types = content.get("layer_types")
    if kind in ("qwen2", "qwen3"):
        window = window if content.get("use_sliding_window", False) else None
        if types is None:  # the first `max_window_layers` layers have no window
            layers = range(content["num_hidden_layers"])
            full = content.get("max_window_layers", DEFAULT_FULL_LAYERS)
            types = ["sliding_attention" if i >= full else "full_attention" for i in layers]
        if window is not None and set(types) == {"full_attention"}:
            window = None
    elif window is not None and kind != "mistral":
        raise UserError(
            f"{file}: sliding_window={window}, which transformers does not apply in a model of type {kind}: "
            "set it to null, or model_type to mistral"
        )
    if len(set(types or ())) > 1 and (window is not None or kind not in ("qwen2", "qwen3")):
        key = "layer_types" if content.get("layer_types") else "max_window_layers"
        raise UserError(f"{file}: with this {key} layers differ, and in this decoder all layers have the same window")
    return window


def _rope(content: dict[str, Any], file: object) -> dict[str, Any]:
    """Reads the options of RoPE from transformers 5 (`rope_parameters`) or 4 (`rope_theta`, `rope_scaling`).

    `dynamic` is our dynamic_ntk with L = max_position_embeddings: both replace base by base · α^(H / (H − 2)) with
    α = f · S / L − (f − 1) for S > L tokens.
    """
    section = "rope_parameters" if content.get("rope_parameters") else "rope_scaling"
    given = content.get(section) or {}
    if any(isinstance(value, dict) for value in given.values()):
        raise UserError(
            f"{file}: {section} differ by the type of a layer, and in this decoder all layers have the same"
        )
    kinds = {given[key] for key in ("rope_type", "type") if key in given} or {"default"}
    if len(kinds) > 1:
        raise UserError(f"{file}: {section}.rope_type and {section}.type differ: remove one")
    (kind,) = kinds
    rotated = given.get("partial_rotary_factor", content.get("partial_rotary_factor"))
    if rotated not in (None, 1):
        raise UserError(f"{file}: partial_rotary_factor={rotated}, and this decoder rotates whole heads only")
    found = {"base": float(given.get("rope_theta", content.get("rope_theta", 10_000.0)))}
    if kind == "default":
        return found
    if kind not in ("linear", "dynamic", "llama3"):
        raise UserError(
            f"{file}: {section}.rope_type={kind!r} is not imported; default, linear, dynamic and llama3 are"
        )
    factor = float(given["factor"])
    if factor == 1.0 and kind != "dynamic":
        return found
    if kind == "linear":
        return found | {"scaling": "linear", "factor": factor}
    if kind == "llama3":
        bounds = {key: float(given[key]) for key in ("low_freq_factor", "high_freq_factor")}
        length = given["original_max_position_embeddings"]
        return found | {"scaling": "llama3", "factor": factor, "train_length": length} | bounds
    return found | {"scaling": "dynamic_ntk", "factor": factor, "train_length": content["max_position_embeddings"]}
