"""Megatron-core's tensor-parallel layers (arXiv:1909.08053) and loss, as the decoder uses them.

Activations are [T, D] with T packed tokens. Under sequence parallelism a rank has T / tensor_size of them outside of the
parallel layers.
"""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from ssscale.layout import IGNORE
from ssscale.parallel import fp8, megatron_patches, overlapped
from ssscale.parallel.groups import Groups
from ssscale.parallel.megatron_patches import TransformerConfig, initialize_rng_tracker, tensor_parallel
from ssscale.parallel.operators import (
    column_product,
    cross_entropy,
    row_product,
    sum_gradient,
    sum_over_ranks,
    uncompiled,
)
from ssscale.parallel.splits import mark_split

VOCAB_MULTIPLE = 128  # tensor cores need aligned matrices; the rows of each tensor-parallel rank are a multiple of this
ROWS_READ = 8_192  # tokens whose losses are computed at once in evaluation


def _leave_uninitialized(weight: Tensor) -> None:
    """Does nothing. `ssscale.model.init` fills all weights, with the same values in every parallel layout."""


@dataclass
class MegatronConfig(TransformerConfig):
    """Megatron-core's configuration, and what our layers need besides.

    group_name: of the tensor-parallel group. in_graph: as in `Groups`. own: the index of this rank if its own tokens are
    multiplied while those of the others are gathered, else −1. keep_gathered: under sequence parallelism, a
    ColumnParallelLinear keeps its gathered input for the gradient of the weight. Otherwise it gathers the input again.
    copy_engines: under sequence parallelism, exchanges run beside the products (`ssscale.parallel.overlapped`); `own` is set.
    linear_fp8: the recipe of `ssscale.parallel.fp8` for linear layers; empty: none. (Megatron-core's own `fp8` stays off.)
    """

    group_name: str = ""
    in_graph: bool = False
    own: int = -1
    keep_gathered: bool = False
    copy_engines: bool = False
    linear_fp8: str = ""

    def in_fp8(self, recipe: str) -> "MegatronConfig":
        """Returns the same configuration for layers that multiply in fp8."""
        changed = copy.copy(self)
        changed.linear_fp8 = recipe
        return changed


def megatron_config(
    groups: Groups,
    sequence_parallel: bool,
    dtype: torch.dtype,
    keep_gathered: bool = False,
    overlap_gathers: bool = False,
    copy_engines: bool = False,
) -> MegatronConfig:
    """Returns the configuration for Megatron-core's layers. They do not use the numbers of layers and heads in it.

    dtype: of the weights.
    """
    megatron_patches.apply()
    initialize_rng_tracker(inference_rng_tracker=True)
    in_graph = groups.in_graph and groups.tensor_size > 1
    return MegatronConfig(
        num_layers=1,
        hidden_size=groups.tensor_size,
        num_attention_heads=groups.tensor_size,
        tensor_model_parallel_size=groups.tensor_size,
        sequence_parallel=sequence_parallel and groups.tensor_size > 1,
        params_dtype=dtype,
        use_cpu_initialization=True,
        perform_initialization=False,
        gradient_accumulation_fusion=False,
        group_name=groups.tensor_group.group_name if in_graph else "",
        in_graph=in_graph,
        own=groups.tensor_rank if overlap_gathers or copy_engines else -1,
        keep_gathered=keep_gathered,
        copy_engines=copy_engines and sequence_parallel and groups.tensor_size > 1,
    )


def _is_whole(layer: nn.Module) -> bool:
    """Whether the rank has the whole weight and no gradient is needed, so that a plain matrix product is enough.

    Megatron-core's forward takes several times as long on the host, which slows down decoding one token at a time.
    """
    return layer.config.tensor_model_parallel_size == 1 and not torch.is_grad_enabled()


def _forward(layer: nn.Module, forward: Callable[..., Any], *arguments: Any) -> tuple[Tensor, None]:
    """Runs Megatron-core's forward pass of a layer, outside of compiled graphs if it communicates."""
    shared = layer.config.tensor_model_parallel_size > 1
    found: tuple[Tensor, None] = uncompiled(forward, *arguments) if shared else forward(*arguments)
    return found


def _exchange_of(layer: nn.Module) -> tuple[int, str, bool, int]:
    """Returns what the operators of both products need to know about the exchange."""
    config = layer.config
    return config.tensor_model_parallel_size, config.group_name, layer.sequence_parallel, config.own


class ColumnParallelLinear(tensor_parallel.ColumnParallelLinear):
    """Y = X Wᵀ with W split along its output dimension."""

    def forward(self, input_: Tensor, weight: Tensor | None = None) -> tuple[Tensor, None]:
        if _is_whole(self):
            return F.linear(input_, self.weight if weight is None else weight), None
        if self.config.in_graph:
            weight = self.weight if weight is None else weight
            ranks, group, sequence, own = _exchange_of(self)
            if self.config.copy_engines:
                return overlapped.column_product(input_, weight, ranks, group, own, self.config.keep_gathered), None
            return column_product(input_, weight, ranks, group, sequence, own, self.config.keep_gathered), None
        return _forward(self, super().forward, input_, weight)


class RowParallelLinear(tensor_parallel.RowParallelLinear):
    """Y = X Wᵀ with W split along its input dimension.

    The partial products of the ranks are summed. Under sequence parallelism the sum is scattered over the ranks.

    product_is_kept: whether selective recomputation keeps the partial product for backward. Megatron-core reduces it in
        place, so that the kept tensor would be reduced a second time; a copy is reduced instead.
    """

    product_is_kept = False

    def forward(self, input_: Tensor) -> tuple[Tensor, None]:
        if _is_whole(self):
            return F.linear(input_, self.weight), None
        if self.config.in_graph:
            ranks, group, sequence, own = _exchange_of(self)
            if self.config.copy_engines:
                return overlapped.row_product(input_, self.weight, ranks, group, own), None
            return row_product(input_, self.weight, ranks, group, sequence, own), None
        return _forward(self, super().forward, input_)

    def _forward_impl(self, input: Tensor, weight: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        # Without an explicit group Megatron-core looks it up and warns, and Dynamo cannot trace the warning.
        kwargs["tp_group"] = self.tp_group
        product = super()._forward_impl(input, weight, *args, **kwargs)
        in_place = self.input_size_per_partition < self.input_size and not self.sequence_parallel
        return product.clone() if self.product_is_kept and in_place else product


class _InFp8(nn.Module):
    """Replaces the product of a linear layer that trains by one in fp8 (`ssscale.parallel.fp8`).

    cast_weight: of this step, set by `ssscale.engine.casts`. Without it, and without gradients, the layer multiplies in the
        dtype of its weight: evaluation sees the weights that checkpoints hold.
    """

    column: bool

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.cast_weight: fp8.CastWeight | None = None

    def forward(self, input_: Tensor, *more: Any) -> tuple[Tensor, None]:
        if not torch.is_grad_enabled() or self.cast_weight is None:
            found: tuple[Tensor, None] = super().forward(input_, *more)
            return found
        config, (out, back) = self.config, self.cast_weight
        exchange = config.tensor_model_parallel_size, config.group_name, self.sequence_parallel, config.keep_gathered
        return fp8.product(input_, self.weight, *out, *back, config.linear_fp8, self.column, *exchange), None


class Fp8ColumnParallelLinear(_InFp8, ColumnParallelLinear):
    column = True


class Fp8RowParallelLinear(_InFp8, RowParallelLinear):
    column = False


FP8_LAYERS = (Fp8ColumnParallelLinear, Fp8RowParallelLinear)


def column_linear(in_size: int, stripes: tuple[int, ...], config: MegatronConfig, own_weight: bool = True) -> nn.Module:
    """Returns a ColumnParallelLinear without bias whose weight stacks several matrices, each split over the ranks.

    stripes: output sizes of these matrices. The whole weight is [Σ stripes, in_size]; a rank holds a share of every one.
    own_weight: False for a layer that gets its weight as an argument of each call (tied embeddings).
    """
    kind = Fp8ColumnParallelLinear if config.linear_fp8 else ColumnParallelLinear
    layer = kind(
        in_size,
        sum(stripes),
        config=config,
        init_method=_leave_uninitialized,
        bias=False,
        gather_output=False,
        skip_weight_param_allocation=not own_weight,
    )
    if own_weight:
        mark_split(layer.weight, 0, stripes)
    return layer


def row_linear(in_size: int, out_size: int, config: MegatronConfig) -> nn.Module:
    """Returns a RowParallelLinear without bias whose input is already split over the ranks."""
    kind = Fp8RowParallelLinear if config.linear_fp8 else RowParallelLinear
    layer = kind(
        in_size,
        out_size,
        config=config,
        init_method=_leave_uninitialized,
        bias=False,
        input_is_parallel=True,
        skip_bias_add=True,
    )
    mark_split(layer.weight, 1, (in_size,))
    return layer


def padded_vocab(vocab_size: int, tensor_size: int) -> int:
    """Returns the number of rows of the whole embedding, over all tensor-parallel ranks.

    It is vocab_size rounded up so that each rank holds the same number of rows, a multiple of VOCAB_MULTIPLE.
    """
    multiple = VOCAB_MULTIPLE * tensor_size
    return -(-vocab_size // multiple) * multiple


def vocabulary_embedding(vocab_size: int, hidden_size: int, config: MegatronConfig) -> nn.Module:
    """Returns a VocabParallelEmbedding. Under sequence parallelism its output is scattered over the tokens."""
    layer = tensor_parallel.VocabParallelEmbedding(
        vocab_size,
        hidden_size,
        init_method=_leave_uninitialized,
        config=config,
        reduce_scatter_embeddings=config.sequence_parallel,
    )
    mark_split(layer.weight, 0, (vocab_size,))
    return layer


def vocabulary_cross_entropy(logits: Tensor, labels: Tensor, groups: Groups) -> Tensor:
    """Returns −ln softmax(logits)[labels] in nats, [T] float32, equal on all tensor-parallel ranks.

    logits: [T, V / tensor_size] float32, overwritten unless `groups.in_graph`. labels: [T] int64.
    """
    if groups.in_graph:
        first = groups.tensor_rank * logits.shape[1]
        found: Tensor = cross_entropy(logits, labels, first, groups.tensor_group.group_name)
        return found
    losses: Tensor = uncompiled(tensor_parallel.vocab_parallel_cross_entropy, logits, labels)
    return losses


class _LogNormalizer(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, group: dist.ProcessGroup) -> Tensor:
        largest = logits.amax(-1)
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
        powers = (logits - largest[:, None]).exp()
        total = powers.sum(-1)
        dist.all_reduce(total, group=group)
        ctx.save_for_backward(
            powers.div_(total[:, None])
        )  # the logits cannot be saved, as `vocabulary_cross_entropy` overwrites them
        return largest + total.log()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (probabilities,) = ctx.saved_tensors
        return gradient[:, None] * probabilities, None


def log_normalizer(logits: Tensor, groups: Groups) -> Tensor:
    """Returns ln Σ exp(logits) over the whole vocabulary, [T] float32, equal on all tensor-parallel ranks.

    logits: [T, V / tensor_size] float32.
    """
    found: Tensor = uncompiled(_LogNormalizer.apply, logits, groups.tensor_group)
    return found


def without_padding(logits: Tensor, vocab_size: int, groups: Groups) -> Tensor:
    """Returns the logits [T, V_local] in float32, with the padding of the vocabulary set to the lowest value."""
    logits = logits.float()
    first = groups.tensor_rank * logits.shape[-1]
    if vocab_size < logits.shape[-1] * groups.tensor_size:
        column = torch.arange(first, first + logits.shape[-1], device=logits.device)
        logits = logits.masked_fill(column >= vocab_size, torch.finfo(torch.float32).min)
    return logits


def squared_log_z(logits: Tensor, labels: Tensor, groups: Groups) -> Tensor:
    """Returns the scalar Σ ln²Z over tokens with a target, Z = Σ exp(logits): z-loss (arXiv:2204.02311, Section 5)."""
    log_z = logits.logsumexp(-1) if groups.tensor_size == 1 else log_normalizer(logits, groups)
    return (log_z.square() * (labels != IGNORE)).sum()


def token_losses(logits: Tensor, labels: Tensor, groups: Groups) -> Tensor:
    """Returns −log p(label) in nats, or 0 if the label is IGNORE: [T] float32.

    logits: [T, V_local] float32, from `without_padding`. labels: [T] int64.
    """
    if groups.tensor_size == 1:
        return F.cross_entropy(logits, labels, ignore_index=IGNORE, reduction="none")
    losses = vocabulary_cross_entropy(logits, labels.clamp(min=0), groups)
    return losses * (labels != IGNORE)


def losses_by_rows(logits: Tensor, labels: Tensor, vocab_size: int, groups: Groups) -> Tensor:
    """Returns what `token_losses` does, for evaluation. logits: [T, V_local] of any dtype, with padding.

    The losses of ROWS_READ tokens at a time are computed, because a float32 copy of the logits, the copy without padding and
    the logarithms of the probabilities take six times the memory of logits in bf16.
    """
    parts = zip(logits.split(ROWS_READ), labels.split(ROWS_READ), strict=True)
    return torch.cat([token_losses(without_padding(some, vocab_size, groups), own, groups) for some, own in parts])


def gather_vocabulary(logits: Tensor, groups: Groups) -> Tensor:
    """Returns the whole logits [T, V] on every tensor-parallel rank. logits: [T, V / tensor_size]."""
    return tensor_parallel.gather_from_tensor_model_parallel_region(logits, group=groups.tensor_group)


class _SumGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        gradient = gradient.contiguous().clone()
        dist.all_reduce(gradient, group=ctx.group)
        return gradient, None


class _SumGradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, group: dist.ProcessGroup, *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.group = group
        return tuple(weight.view_as(weight) for weight in weights)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        total = torch.stack(gradients)
        dist.all_reduce(total, group=ctx.group)
        return None, *total.unbind()


def sum_over_heads(part: Tensor, groups: Groups) -> Tensor:
    """Returns the sum of `part` over the tensor-parallel ranks, equal on all of them.

    The gradient of each rank's `part` is the gradient of the sum.
    """
    if groups.tensor_size == 1:
        return part
    if groups.in_graph:
        return sum_over_ranks(part, groups.tensor_group.group_name)
    return uncompiled(tensor_parallel.reduce_from_tensor_model_parallel_region, part, groups.tensor_group)


def replicated(weight: Tensor, groups: Groups) -> Tensor:
    """Returns a replicated weight whose gradient is summed over the tensor-parallel ranks.

    Needed if each of these ranks applies the weight to its own share of the tokens or heads.
    """
    if groups.tensor_size == 1:
        return weight
    if groups.in_graph:
        return sum_gradient(weight, groups.tensor_group.group_name)
    seen: Tensor = uncompiled(_SumGradient.apply, weight, groups.tensor_group)
    return seen


def replicated_together(weights: Sequence[Tensor], groups: Groups) -> tuple[Tensor, ...]:
    """As `replicated` of each of several weights of one shape. Their gradients are summed at once, after the last of them.

    Outside of compiled graphs. The host needs about as long for this sum as for that of one weight.
    """
    seen: tuple[Tensor, ...] = _SumGradients.apply(groups.tensor_group, *weights)
    return seen
