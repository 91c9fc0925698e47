"""Jobs for the worker pool: one forward and backward pass with the tokens shared over context ranks."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ssscale.data.batch import Batch, take_share
from ssscale.layout import PackedLayout
from ssscale.model.decoder import Decoder
from ssscale.model.init import initialize_weights
from ssscale.model.loss import IGNORE
from ssscale.parallel.groups import Groups
from ssscale.parallel.megatron import global_shape, local_ranges, split_dim
from ssscale.schema import ModelConfig, Recompute
from tests.distributed.jobs import VOCAB, regroup

LENGTH = 48
# Of each row. Over chunks of 24, 12 and 6 tokens: one document over all, some over two or three chunks, some inside one, of
# one token, and some that begin or end where a chunk does.
DOCUMENTS = [[48], [7, 1, 33, 1, 6], [12, 12, 24], [5, 20, 2, 21], [1] * 48]


def make_batch(rows: list[int]) -> Batch:
    generator = torch.Generator().manual_seed(7)
    every = torch.randint(0, VOCAB, (len(DOCUMENTS), LENGTH), generator=generator)
    tokens = every[rows].flatten()
    layout = PackedLayout.from_lengths([length for row in rows for length in DOCUMENTS[row]], LENGTH)
    labels = tokens.roll(-1)
    labels[layout.cu_seqlens[1:] - 1] = IGNORE
    labels[3:9] = IGNORE  # unequal numbers of targets a rank
    return Batch(tokens, labels, layout, torch.zeros(len(rows), dtype=torch.int64), int((labels != IGNORE).sum()))


def whole_gradient(weight: Tensor, groups: Groups) -> Tensor:
    """The gradient over all replicas, put together from the tensor-parallel ranks."""
    gradient = weight.grad.clone()
    dist.all_reduce(gradient, group=groups.replica_group)
    dim = split_dim(weight)
    if dim is None or groups.tensor_size == 1:
        return gradient
    parts = [torch.empty_like(gradient) for _ in range(groups.tensor_size)]
    dist.all_gather(parts, gradient, group=groups.tensor_group)
    whole = gradient.new_zeros(global_shape(weight, groups.tensor_size))
    for rank, part in enumerate(parts):
        start = 0
        for a, b in local_ranges(weight, rank, groups.tensor_size):
            whole.narrow(dim, a, b - a).copy_(part.narrow(dim, start, b - a))
            start += b - a
    return whole


def gradients(
    models: dict[str, ModelConfig],
    microbatches: list[list[int]],
    tensor: int = 1,
    ulysses: int = 1,
    ring: int = 1,
    sequence: bool = False,
    recompute: Recompute = Recompute.none,
) -> dict[str, Any]:
    """By model: the mean loss and each whole gradient, the same on every rank. microbatches: of rows, one after the other."""
    groups, found = regroup(tensor, ulysses, ring), {}
    for name, model in models.items():
        decoder = Decoder(model, groups, LENGTH, sequence_parallel=sequence, recompute=recompute)
        initialize_weights(decoder, model, groups, seed=3)
        total = torch.zeros((), dtype=torch.float64)
        num_targets = sum(make_batch(rows).num_targets for rows in microbatches)
        for number, rows in enumerate(microbatches):
            if number % groups.data_size != groups.data_rank:
                continue
            batch = take_share(make_batch(rows), groups)
            losses = decoder(batch.tokens, batch.layout, batch.labels)
            (losses.sum() / num_targets).backward()
            total += losses.detach().double().sum()
        dist.all_reduce(total, group=groups.replica_group)
        weights = {n: whole_gradient(weight, groups) for n, weight in decoder.named_parameters()}
        rows = model.vocab_size  # what tensor parallelism pads depends on its size
        cut = {n: w[:rows] if n.startswith(("embedding", "head")) else w for n, w in weights.items()}
        found[name] = {"loss": total.item() / num_targets, "gradients": {n: w.tolist() for n, w in cut.items()}}
    return found
