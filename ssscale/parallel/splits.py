"""Which part of a weight a tensor-parallel rank holds: marks of weights, and what follows from them."""

import torch
from torch import Tensor, nn


def mark_split(weight: nn.Parameter, dim: int, stripes: tuple[int, ...]) -> None:
    """Records on a weight how it is split: along `dim`, with each of `stripes` divided over all tensor-parallel ranks.

    Megatron-core sets its own marks only if it initializes the weight. DeepSpeed reads `tensor_model_parallel` to sum the
    gradient norm of a split weight over all ranks.
    """
    weight.tensor_model_parallel = True
    weight.partition_dim = dim
    weight.stripes = stripes


def split_dim(weight: Tensor) -> int | None:
    """Returns the dimension along which a weight is split over the tensor-parallel ranks; None if it is replicated."""
    return int(weight.partition_dim) if getattr(weight, "tensor_model_parallel", False) else None


def global_shape(weight: Tensor, tensor_size: int, shape: torch.Size | None = None) -> list[int]:
    """Returns the shape of the whole weight.

    shape: of the rank's share, if `weight` does not have it because ZeRO-3 has emptied it.
    """
    sizes = list(weight.shape if shape is None else shape)
    dim = split_dim(weight)
    if dim is not None:
        sizes[dim] *= tensor_size
    return sizes


def local_ranges(weight: Tensor, rank: int, tensor_size: int) -> list[tuple[int, int]]:
    """Returns the ranges [start, stop) along `split_dim` of the whole weight that a rank holds, in the rank's order."""
    ranges, start = [], 0
    for stripe in weight.stripes:
        share = stripe // tensor_size
        ranges.append((start + rank * share, start + (rank + 1) * share))
        start += stripe
    return ranges


def local_part(whole: Tensor, weight: Tensor, rank: int, tensor_size: int) -> Tensor:
    """Returns the share of a whole weight that a rank holds. weight: the local weight, marked by `mark_split`."""
    dim = split_dim(weight)
    if dim is None or tensor_size == 1:
        return whole
    return torch.cat([whole.narrow(dim, a, b - a) for a, b in local_ranges(weight, rank, tensor_size)], dim)
