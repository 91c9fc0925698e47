"""Formulas for parameters and FLOPs, which need no model to be built."""

import math
from collections import Counter
from collections.abc import Iterable
from typing import Any

from ssscale.config.schema import ModelConfig
from ssscale.model.weight import Weight, projection_weights

# Dense bf16 FLOP/s of one H100 SXM or H200 according to NVIDIA's data sheet. MFU is relative to it.
PEAK_FLOPS = 989e12


def count_parameters(model: ModelConfig, length: int) -> int:
    """Returns the parameters of the whole model: L·(4d² + 3·d·f + 2d) + d + embeddings. Under GQA, 4d² is smaller.

    `declared_weights` are added. The vocabulary is the tokenizer's, without the padding of tensor parallelism.
    """
    return sum(parameters_by_part(model, length).values())


def parameters_by_part(model: ModelConfig, length: int) -> dict[str, int]:
    """Returns the parameters by kind.

    `embedding`: the embedding and, if untied, the head. `matrices`: the matrices of the blocks, which tensor
    parallelism splits. `vectors`: norms and `declared_weights`.
    """
    d = model.hidden_size
    attention = 2 * d * model.head_size * (model.num_heads + model.kv_heads)
    # Of one layer per mixer: `ssscale.train.scale` counts the parameters of a model for each of a thousand layouts.
    declared = [weight for mixer in model.used.values() for weight in mixer.shared_weights(model, length).values()]
    layers = Counter(model.mixers[layer % len(model.mixers)] for layer in range(model.num_layers))
    sizes = (
        number * _size(_layer_weights(model, model.mixer_called(name)).values()) for name, number in layers.items()
    )
    return {
        "embedding": model.vocab_size * d * (1 if model.tie_embeddings else 2),
        "matrices": model.num_layers * (attention + 3 * d * model.ffn_hidden_size),
        "vectors": model.num_layers * 2 * d + d + _size(declared) + sum(sizes),
    }


def _size(weights: Iterable[Weight]) -> int:
    return sum(math.prod(weight.shape) for weight in weights)


def declared_weights(model: ModelConfig, length: int) -> dict[str, Weight]:
    """Returns the weights that the mixers, the position method and the projections declare, by parameter name."""
    found: dict[str, Weight] = {}
    for name, mixer in model.used.items():
        found |= {f"shared.{name}.{own}": weight for own, weight in mixer.shared_weights(model, length).items()}
    for layer, mixer in enumerate(model.layer_mixers):
        own = _layer_weights(model, mixer)
        found |= {f"blocks.{layer}.attention.{name}": weight for name, weight in own.items()}
    return found


def is_of_mixer(name: str) -> bool:
    """Whether a parameter is one that a mixer declares."""
    return name.startswith("shared.") or ".attention.weights." in name


def _layer_weights(model: ModelConfig, mixer: Any) -> dict[str, Weight]:
    """Returns the weights that each layer with a mixer declares, by their names within its attention."""
    found = {f"weights.{name}": weight for name, weight in mixer.weights(model).items()}
    found |= {f"position_weights.{name}": weight for name, weight in model.place_of(mixer).weights(model).items()}
    return found | {f"projection_weights.{name}": weight for name, weight in projection_weights(model).items()}


def flops_per_token(model: ModelConfig, length: int, causal_half: bool) -> float:
    """Returns the FLOPs of forward and backward per token: 6N + 12·L·d·S, or 6N + 6·L·d·S if `causal_half`.

    `causal_half` does not count the masked half of the attention matrix. Published MFU mostly uses the first formula.
    Both take a row as one document. N: parameters without the input embedding; a tied one counts, because it is the
    output matrix. d = num_heads · head_dim. S: tokens per row. The second term is the sum of `Mixer.flops` over the
    layers, which is 12·d·S per layer for the built-in mixers.
    """
    n = count_parameters(model, length) - (0 if model.tie_embeddings else model.vocab_size * model.hidden_size)
    width = model.num_heads * model.head_size
    keys = length / 2 if causal_half else length
    return 6.0 * n + sum(mixer.flops(width, keys) for mixer in model.layer_mixers)
