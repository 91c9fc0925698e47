"""Parameters and FLOPs by formula, without building the model."""

from ssscale.config.schema import Core, ModelConfig, PositionMethod, SSMaxVariant

# Dense bf16 FLOP/s of one H100 SXM or H200 by NVIDIA's data sheet; MFU is measured against it.
PEAK_FLOPS = 989e12


def count_parameters(model: ModelConfig, length: int) -> int:
    """Parameters of the whole model: L·(4d² + 3·d·f + 2d) + d + embeddings, where d² splits by heads under GQA.

    SSMax adds s per layer and head (L·N), with bias s and b (2·L·N), in the p_n study also `length` shared p_n. FIRE adds
    c, L_mult and an MLP 1 → 32 → N per layer: L·(66 + 33·N).
    The vocabulary is the tokenizer's: what tensor parallelism pads does not count.
    """
    return sum(parameters_by_part(model, length).values())


def parameters_by_part(model: ModelConfig, length: int) -> dict[str, int]:
    """`embedding` (both matrices when untied), `matrices` of the blocks (what tensor parallelism splits), `vectors`."""
    d, heads = model.hidden_size, model.num_layers * model.num_heads
    attention = 2 * d * model.head_size * (model.num_heads + model.kv_heads)
    scales = {SSMaxVariant.learned: heads, SSMaxVariant.fixed: 0, SSMaxVariant.bias: 2 * heads}
    scales[SSMaxVariant.pn] = 2 * heads + length
    ssmax = scales[model.attention.ssmax] if model.attention.core is Core.ssmax else 0
    fire = model.num_layers * (66 + 33 * model.num_heads) if model.position.method is PositionMethod.fire else 0
    return {
        "embedding": model.vocab_size * d * (1 if model.tie_embeddings else 2),
        "matrices": model.num_layers * (attention + 3 * d * model.ffn_hidden_size),
        "vectors": model.num_layers * 2 * d + d + ssmax + fire,
    }


def flops_per_token(model: ModelConfig, length: int, causal_half: bool) -> float:
    """Forward and backward: 6N + 12·L·d·S, or 6N + 6·L·d·S when the causal mask's empty half is not counted.

    N leaves out the input embedding unless it is tied (then it is the output matrix), d = num_heads · head_dim, S = row
    length in tokens. Published MFU mostly uses the first count; both take a row as one document.
    """
    n = count_parameters(model, length) - (0 if model.tie_embeddings else model.vocab_size * model.hidden_size)
    width = model.num_heads * model.head_size
    return 6.0 * n + (6.0 if causal_half else 12.0) * model.num_layers * width * length
