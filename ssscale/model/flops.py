"""Parameters and FLOPs by formula, without building the model."""

import math

from ssscale.config.schema import ModelConfig
from ssscale.model.weight import Weight

# Dense bf16 FLOP/s of one H100 SXM or H200 by NVIDIA's data sheet; MFU is measured against it.
PEAK_FLOPS = 989e12


def count_parameters(model: ModelConfig, length: int) -> int:
    """Parameters of the whole model: L·(4d² + 3·d·f + 2d) + d + embeddings, where d² splits by heads under GQA.

    What mixers and the position method learn besides counts as they declare it. The vocabulary is the tokenizer's: what
    tensor parallelism pads does not count.
    """
    return sum(parameters_by_part(model, length).values())


def parameters_by_part(model: ModelConfig, length: int) -> dict[str, int]:
    """`embedding` (both matrices when untied), `matrices` of the blocks (what tensor parallelism splits), `vectors`."""
    d = model.hidden_size
    attention = 2 * d * model.head_size * (model.num_heads + model.kv_heads)
    declared = declared_weights(model, length).values()
    return {
        "embedding": model.vocab_size * d * (1 if model.tie_embeddings else 2),
        "matrices": model.num_layers * (attention + 3 * d * model.ffn_hidden_size),
        "vectors": model.num_layers * 2 * d + d + sum(math.prod(weight.shape) for weight in declared),
    }


def declared_weights(model: ModelConfig, length: int) -> dict[str, Weight]:
    """What mixers and the position method learn, by the parameter's name."""
    found: dict[str, Weight] = {}
    for name, mixer in model.used.items():
        found |= {f"shared.{name}.{own}": weight for own, weight in mixer.shared_weights(model, length).items()}
    for layer, mixer in enumerate(model.layer_mixers):
        at = f"blocks.{layer}.attention"
        found |= {f"{at}.weights.{own}": weight for own, weight in mixer.weights(model).items()}
        found |= {f"{at}.position_weights.{own}": w for own, w in model.place_of(mixer).weights(model).items()}
    return found


def flops_per_token(model: ModelConfig, length: int, causal_half: bool) -> float:
    """Forward and backward: 6N + 12·L·d·S, or 6N + 6·L·d·S when the causal mask's empty half is not counted.

    The second term is the sum of what the layers' mixers count, 12·d·S for the built-in ones.
    N leaves out the input embedding unless it is tied (then it is the output matrix), d = num_heads · head_dim, S = row
    length in tokens. Published MFU mostly uses the first count; both take a row as one document.
    """
    n = count_parameters(model, length) - (0 if model.tie_embeddings else model.vocab_size * model.hidden_size)
    width = model.num_heads * model.head_size
    keys = length / 2 if causal_half else length
    return 6.0 * n + sum(mixer.flops(width, keys) for mixer in model.layer_mixers)
