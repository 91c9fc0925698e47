"""Megatron-core's tensor-parallel layers, as the decoder uses them.

Activations are [T, D]: T packed tokens, or T / tensor_size of them between blocks under sequence parallelism.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import tensor_parallel
from megatron.core.tensor_parallel.random import initialize_rng_tracker
from megatron.core.transformer.transformer_config import TransformerConfig as TransformerConfig
from torch import Tensor, nn

from ssscale.parallel import megatron_patches
from ssscale.parallel.groups import Groups


def _leave_uninitialized(weight: Tensor) -> None:
    """`ssscale.model.init` fills all weights, the same ones whatever the parallel layout."""


def megatron_config(groups: Groups, sequence_parallel: bool, dtype: torch.dtype) -> TransformerConfig:
    """What Megatron-core's layers read of their configuration; head and layer counts there are ours to ignore."""
    megatron_patches.apply()
    initialize_rng_tracker(inference_rng_tracker=True)
    return TransformerConfig(
        num_layers=1,
        hidden_size=groups.tensor_size,
        num_attention_heads=groups.tensor_size,
        tensor_model_parallel_size=groups.tensor_size,
        sequence_parallel=sequence_parallel and groups.tensor_size > 1,
        params_dtype=dtype,
        use_cpu_initialization=True,
        perform_initialization=False,
        gradient_accumulation_fusion=False,
    )


def _is_whole(layer: nn.Module) -> bool:
    """One rank has the whole weight and no gradient is asked for: a product is all there is to do.

    Megatron-core's way there takes several times as long on the host, which decoding a token at a time waits for.
    """
    return layer.config.tensor_model_parallel_size == 1 and not torch.is_grad_enabled()


@torch.compiler.disable
def _uncompiled(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call what exchanges something between ranks, outside of any compiled graph.

    Dynamo of torch 2.11 traces Megatron-core's exchanges and lets no gradient through them, without a word; 2.13 breaks
    the graph there.
    """
    return function(*arguments)


def _forward(layer: nn.Module, forward: Callable[..., Any], *arguments: Any) -> tuple[Tensor, None]:
    """Megatron-core's forward pass of a layer."""
    shared = layer.config.tensor_model_parallel_size > 1
    found: tuple[Tensor, None] = _uncompiled(forward, *arguments) if shared else forward(*arguments)
    return found


class ColumnParallelLinear(tensor_parallel.ColumnParallelLinear):
    """Y = X Wᵀ with W split along its output."""

    def forward(self, input_: Tensor, weight: Tensor | None = None) -> tuple[Tensor, None]:
        if _is_whole(self):
            return F.linear(input_, self.weight if weight is None else weight), None
        return _forward(self, super().forward, input_, weight)


class RowParallelLinear(tensor_parallel.RowParallelLinear):
    """Y = X Wᵀ with W split along its input; the partial sums are reduced (scattered under sequence parallelism).

    product_is_kept: the partial sums are kept for backward; Megatron-core would reduce them in place, and twice so.
    """

    product_is_kept = False

    def forward(self, input_: Tensor) -> tuple[Tensor, None]:
        if _is_whole(self):
            return F.linear(input_, self.weight), None
        return _forward(self, super().forward, input_)

    def _forward_impl(self, input: Tensor, weight: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        # Megatron-core passes no group here and then warns that it had to look it up; Dynamo cannot trace that warning.
        kwargs["tp_group"] = self.tp_group
        product = super()._forward_impl(input, weight, *args, **kwargs)
        in_place = self.input_size_per_partition < self.input_size and not self.sequence_parallel
        return product.clone() if self.product_is_kept and in_place else product


def column_linear(
    in_size: int, stripes: tuple[int, ...], config: TransformerConfig, own_weight: bool = True
) -> nn.Module:
    """A ColumnParallelLinear whose output is several matrices side by side, each split over the ranks.

    stripes: their output sizes. The global weight is [Σ stripes, in_size]; a rank holds its share of every stripe.
    own_weight: False for a layer that is given its weight at each call (tied embeddings).
    """
    layer = ColumnParallelLinear(
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


def row_linear(in_size: int, out_size: int, config: TransformerConfig) -> nn.Module:
    """A RowParallelLinear without bias whose input is already split."""
    layer = RowParallelLinear(
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


def vocabulary_embedding(vocab_size: int, hidden_size: int, config: TransformerConfig) -> nn.Module:
    """A VocabParallelEmbedding, its output scattered over the sequence under sequence parallelism."""
    layer = tensor_parallel.VocabParallelEmbedding(
        vocab_size,
        hidden_size,
        init_method=_leave_uninitialized,
        config=config,
        reduce_scatter_embeddings=config.sequence_parallel,
    )
    mark_split(layer.weight, 0, (vocab_size,))
    return layer


def vocabulary_cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """−log softmax(logits)[labels] for logits [T, V / tensor_size] float32; they are overwritten. Returns [T]."""
    losses: Tensor = _uncompiled(tensor_parallel.vocab_parallel_cross_entropy, logits, labels)
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
        )  # not the logits, which `vocabulary_cross_entropy` overwrites
        return largest + total.log()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (probabilities,) = ctx.saved_tensors
        return gradient[:, None] * probabilities, None


def log_normalizer(logits: Tensor, groups: Groups) -> Tensor:
    """ln Σ exp(logits) over the whole vocabulary for logits [T, V / tensor_size] float32. Returns [T], alike on all ranks."""
    found: Tensor = _uncompiled(_LogNormalizer.apply, logits, groups.tensor_group)
    return found


def gather_vocabulary(logits: Tensor, groups: Groups) -> Tensor:
    """[T, V / tensor_size] of each rank → [T, V] on all."""
    return tensor_parallel.gather_from_tensor_model_parallel_region(logits, group=groups.tensor_group)


def mark_split(weight: nn.Parameter, dim: int, stripes: tuple[int, ...]) -> None:
    """Record how a weight is split: along `dim`, each of `stripes` over all ranks.

    Megatron-core sets its own marks only when it initialises; DeepSpeed reads `tensor_model_parallel` to count a split
    weight's gradient norm over all ranks.
    """
    weight.tensor_model_parallel = True
    weight.partition_dim = dim
    weight.stripes = stripes


def split_dim(weight: Tensor) -> int | None:
    """The dimension along which a weight is split over the tensor-parallel ranks; None for a replicated one."""
    return int(weight.partition_dim) if getattr(weight, "tensor_model_parallel", False) else None


def global_shape(weight: Tensor, tensor_size: int, shape: torch.Size | None = None) -> list[int]:
    """The shape of the whole weight of which each rank holds a part (or `shape`, where ZeRO-3 has emptied it)."""
    sizes = list(weight.shape if shape is None else shape)
    dim = split_dim(weight)
    if dim is not None:
        sizes[dim] *= tensor_size
    return sizes


def local_ranges(weight: Tensor, rank: int, tensor_size: int) -> list[tuple[int, int]]:
    """The ranges [start, stop) along `split_dim` of the whole weight that a rank holds, in the order it holds them."""
    ranges, start = [], 0
    for stripe in weight.stripes:
        share = stripe // tensor_size
        ranges.append((start + rank * share, start + (rank + 1) * share))
        start += stripe
    return ranges


def local_part(whole: Tensor, weight: Tensor, rank: int, tensor_size: int) -> Tensor:
    """The part of a whole weight that a rank holds."""
    dim = split_dim(weight)
    if dim is None or tensor_size == 1:
        return whole
    return torch.cat([whole.narrow(dim, a, b - a) for a, b in local_ranges(weight, rank, tensor_size)], dim)


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


def sum_over_heads(part: Tensor, groups: Groups) -> Tensor:
    """The sum of what tensor-parallel ranks found in their heads, alike on all; each rank's part gets the whole gradient."""
    if groups.tensor_size == 1:
        return part
    return _uncompiled(tensor_parallel.reduce_from_tensor_model_parallel_region, part, groups.tensor_group)


def replicated(weight: Tensor, groups: Groups) -> Tensor:
    """A replicated weight, of which each tensor-parallel rank sees a part of the tokens or heads: its gradient is summed."""
    if groups.tensor_size == 1:
        return weight
    seen: Tensor = _uncompiled(_SumGradient.apply, weight, groups.tensor_group)
    return seen
