"""The configuration of an exported model: the class for transformers, and its strict reading."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from transformers import PretrainedConfig

from .keys import NUMBER, Keys
from .mixer import Mixer, Shape
from .mixers import MIXERS
from .positions import Position, read_position

# What transformers and vLLM read from config.json by themselves.
COMMON = ("architectures", "model_type", "dtype", "auto_map", "transformers_version", "_name_or_path")
TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
# What only initialization and training read. use_cache: vLLM always caches.
TRAINING = ("initializer_range", "depth_scaled_init", "use_cache")
WIDTH_TRAINING = ("base_hidden_size", "matrix_lr_divisor", "matrix_init_divisor")


class SSScaleConfig(PretrainedConfig):
    """config.json as it is; `read_model` gives its values their meaning."""

    model_type = "ssscale"

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        if kwargs.get("mixers"):  # transformers also builds empty configurations
            read_model(self.to_dict())


@dataclass(frozen=True)
class Width:
    """The multipliers of width transfer. attention_scale: factor of q·k."""

    embedding_multiplier: float
    residual_multiplier: float
    logits_divisor: float
    attention_scale: float


@dataclass(frozen=True)
class Model:
    """An exported model. layers: the mixer of each layer. length: tokens per training row."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    qkv_bias: bool
    qk_norm: bool
    norm_eps: float
    tied: bool
    length: int
    layers: tuple[Mixer, ...]
    position: Position
    width: Width

    @property
    def mixers(self) -> dict[str, Mixer]:
        return {mixer.name: mixer for mixer in self.layers}

    def projection_weights(self) -> dict[str, Shape]:
        """The biases and norms of a layer's queries, keys and values."""
        found: dict[str, Shape] = {}
        if self.qkv_bias:
            heads = {"q": self.num_heads, "k": self.num_kv_heads, "v": self.num_kv_heads}
            found |= {f"{name}_bias": (count * self.head_dim,) for name, count in heads.items()}
        if self.qk_norm:
            found |= {f"{name}_norm": (self.head_dim,) for name in ("q", "k")}
        return found

    def learned(self) -> dict[str, Shape]:
        """The weights of layers beside matrices and the norms of blocks, by their names in the export."""
        found: dict[str, Shape] = {}
        for name, mixer in self.mixers.items():
            found |= {f"shared.{name}.{key}": shape for key, shape in mixer.shared_weights(self.length).items()}
        for i, mixer in enumerate(self.layers):
            shapes = mixer.layer_weights(self.num_heads)
            found |= {f"blocks.{i}.attention.weights.{key}": shape for key, shape in shapes.items()}
            own = self.projection_weights()
            found |= {f"blocks.{i}.attention.projection_weights.{key}": shape for key, shape in own.items()}
        return found


def read_model(content: dict[str, Any]) -> Model:
    """Reads config.json, or a configuration's `to_dict()`.

    Raises ValueError, with one sentence, for a key that is missing or unknown and for a value that cannot be served.
    """
    keys = Keys("", content)
    keys.skip(*COMMON, *TOKENS, *TRAINING)
    heads, head_dim = keys.take("num_attention_heads", int), keys.take("head_dim", int)
    number, pattern = keys.take("num_hidden_layers", int), keys.take("mixers", list)
    if not pattern:
        raise ValueError("config.json: mixers=[] names no mixer")
    section, position = keys.section("mixer"), read_position(keys.section("position"))
    mixers = {name: _read_mixer(name, section) for name in dict.fromkeys(pattern)}
    section.done()
    for mixer in mixers.values():
        mixer.place(position.name)
    model = Model(
        vocab_size=keys.take("vocab_size", int),
        hidden_size=keys.take("hidden_size", int),
        intermediate_size=keys.take("intermediate_size", int),
        num_heads=heads,
        num_kv_heads=keys.take("num_key_value_heads", int),
        head_dim=head_dim,
        qkv_bias=keys.take("qkv_bias", bool),
        qk_norm=keys.take("qk_norm", bool),
        norm_eps=float(keys.take("rms_norm_eps", NUMBER)),
        tied=keys.take("tie_word_embeddings", bool),
        length=keys.take("max_position_embeddings", int),
        layers=tuple(mixers[pattern[i % len(pattern)]] for i in range(number)),
        position=position,
        width=_read_width(keys.section("width"), head_dim),
    )
    _check_learned(keys.take("learned", list), model.learned())
    _skip_defaults(keys)
    keys.done()
    return model


def _read_mixer(name: str, section: Keys) -> Mixer:
    if name not in MIXERS:
        raise ValueError(f"config.json: mixers has {name}, and this vLLM plugin serves {', '.join(MIXERS)}")
    return MIXERS[name].read(name, section.section(name))


def _read_width(keys: Keys, head_dim: int) -> Width:
    keys.skip(*WIDTH_TRAINING)
    given = keys.take("attention_scale", NUMBER, None)
    numbers = {
        key: float(keys.take(key, NUMBER)) for key in ("embedding_multiplier", "residual_multiplier", "logits_divisor")
    }
    keys.done()
    # As in the exported code, 0 stands for the default too.
    return Width(**numbers, attention_scale=float(given or head_dim**-0.5))


def _check_learned(given: list[Any], known: dict[str, Shape]) -> None:
    """Compares the declared weights, [[name, shape, start], ...], with those that this plugin loads."""
    found = {name: tuple(shape) for name, shape, _ in given}
    for name in [*found, *known]:
        if found.get(name) != known.get(name):
            shapes = f"{found.get(name)} in config.json, {known.get(name)} in this vLLM plugin"
            raise ValueError(f"config.json: the weight {name} is not known with this shape: {shapes}")


def _skip_defaults(keys: Keys) -> None:
    """Drops what transformers adds to every configuration, where it has the default value."""
    for name, value in PretrainedConfig().to_dict().items():
        if name in keys.left and keys.left[name] == value:
            keys.skip(name)
