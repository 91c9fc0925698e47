"""Gradients of odd sizes, and what each rank owns of them; a job for the worker pool that exchanges them with gloo."""

import torch
from torch import Tensor

from ssscale.engine.direct import DirectGradients
from ssscale.parallel.copies import Processes
from tests.distributed.jobs import regroup

# By bucket, the sizes of its weights, and elements of padding: odd ones, some cut by one boundary, some by several, and
# some partitions with many weights. A bucket is as long as a multiple of the ranks.
WEIGHTS = ((7, 1, 1, 120, 3), (1,), (33, 64), (2, 2, 2, 2, 2, 2), (5,))


def layout(ranks: int) -> tuple[list[int], list[list[tuple[int, int]]]]:
    """Returns the elements per partition, by bucket, and places (`DirectGradients`)."""
    places = [[(sum(sizes[:i]), size) for i, size in enumerate(sizes)] for sizes in WEIGHTS]
    return [-(-sum(sizes) // ranks) for sizes in WEIGHTS], places


def gradients_of(step: int, rank: int) -> list[list[Tensor]]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return [[torch.randn(size, generator=generator).bfloat16() for size in sizes] for sizes in WEIGHTS]


def owned(bucket: list[Tensor], rank: int, ranks: int) -> Tensor:
    """Returns what a rank owns of the gradients of a bucket, cut by plain arithmetic: [n], without the padding."""
    whole = torch.cat(bucket)
    partition = -(-len(whole) // ranks)
    return whole[rank * partition : (rank + 1) * partition]


def parts_of(direct: DirectGradients) -> list[list[list[Tensor]]]:
    """By bucket, weight and rank, what this rank owns of the gradients."""
    return [[direct.own_parts(i, j) for i, j in sorted(direct.own) if i == bucket] for bucket in range(len(WEIGHTS))]


def check_parts(found: list[list[list[Tensor]]], step: int, rank: int, ranks: int) -> None:
    """Compares `parts_of` with what the ranks have sent."""
    for bucket, weights in enumerate(found):
        for sender in range(ranks):
            expected = owned(gradients_of(step, sender)[bucket], rank, ranks)
            values = torch.cat([expected[:0], *(parts[sender] for parts in weights)])
            assert torch.equal(values, expected), f"step {step}, bucket {bucket}, from rank {sender}"


def push(let_go: bool) -> str:
    """Exchanges odd pieces between processes (`ProcessPushes`). let_go: whether a gradient is forgotten too early."""
    groups = regroup(1)
    peers = Processes(groups.replica_group, groups.device)
    direct = DirectGradients(peers, *layout(peers.ranks))
    for step in range(3):
        for i, bucket in enumerate(gradients_of(step, peers.rank)):
            for j, gradient in enumerate(bucket):
                direct.keep(i, j, gradient)
                direct.push(i, j)
        del bucket, gradient
        if let_go:
            direct.clear()
            try:
                direct.finish()
            except AssertionError as error:
                return "let go" if "let go before" in str(error) else str(error)
        direct.finish()
        check_parts(parts_of(direct), step, peers.rank, peers.ranks)
        direct.clear()
    return "good"
