"""Jobs for the worker pool: a forward and backward pass with the model's terms in the loss."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from ssscale.config.schema import ModelConfig
from ssscale.layout import PackedLayout
from ssscale.model.decoder import Attention, Decoder
from ssscale.model.init import initialize_weights
from ssscale.model.mixers.softmax import Softmax
from ssscale.parallel.megatron import sum_over_heads
from ssscale.parallel.splits import local_part
from tests.distributed.jobs import LENGTH, make_batch, regroup

Z_WEIGHT, SIZE_WEIGHT = 0.3, 0.05


class Sized(Softmax):
    """Softmax attention with a term: Σ q² over tokens, heads and layers."""

    @property
    def terms(self) -> Mapping[str, float]:
        return {"size": SIZE_WEIGHT}

    def measure(self, qkv: Tensor, mixed: Tensor, layer: Attention, layout: PackedLayout) -> dict[str, Tensor]:
        return {"size": sum_over_heads(qkv[:, : layer.heads].float().square().sum(), layer.groups)}


def passed(
    model: ModelConfig, tensor: int = 1, sequence: bool = False, compiled: bool = False, whole: bool = False
) -> dict[str, Any]:
    """Terms, the summed losses and this rank's gradients of Σ losses + Σ weighted terms."""
    groups = regroup(tensor)
    options = {"sequence_parallel": sequence, "z_loss": Z_WEIGHT, "compile_exchanges": whole}
    decoder = Decoder(model, groups, LENGTH, **options)
    for block in decoder.blocks:
        block.attention.mixer = Sized()
    decoder.terms |= Sized().terms
    initialize_weights(decoder, model, groups, seed=3)
    if compiled:
        decoder.compile_parts(backend="aot_eager")
    losses, terms = decoder(*make_batch([0, 1]), with_terms=True)
    (losses.sum() + sum(weight * terms[name] for name, weight in decoder.terms.items())).backward()
    return {
        "loss": losses.sum().item(),
        "terms": {name: term.item() for name, term in terms.items()},
        "gradients": {name: weight.grad for name, weight in decoder.named_parameters()},
        "weights": {name: weight.detach() for name, weight in decoder.named_parameters()},
    }


def differences(
    model: ModelConfig, expected: dict[str, Tensor], tensor: int, sequence: bool, whole: bool
) -> dict[str, Any]:
    """Of the gradients of a layout to those of one process, relative to each one's largest element."""
    found = passed(model, tensor, sequence, compiled=whole, whole=whole)
    groups = regroup(tensor)
    decoder = Decoder(model, groups, LENGTH, sequence_parallel=sequence)
    errors = {}
    for name, weight in decoder.named_parameters():
        wanted = local_part(expected[name], weight, groups.tensor_rank, tensor)
        errors[name] = float((found["gradients"][name] - wanted).abs().max() / wanted.abs().max())
    return {"loss": found["loss"], "terms": found["terms"], "errors": errors}
