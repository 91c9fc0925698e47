"""Gradients that stay where autograd has put them until the update: a step of one microbatch with `parallel.copy_engines`.

`Exchange` uses this in place of reductions. Each rank gets its pieces of the other ranks' gradients while backward runs
(`ssscale.parallel.pushes` has the protocol), and the update adds them in float32, in the order of the ranks. A weight, or its
gradient, lies in one partition or in several neighboring ones, as a boundary may cut it. bf16 gradients cost 2 · (R − 1) / R
bytes per parameter for what R ranks send, besides the gradients themselves.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ssscale.parallel.copies import Peers, Processes
from ssscale.parallel.pushes import Fragment, pushes_of

ALIGNED_ELEMENTS = 64  # 128 bytes: received pieces are then aligned as their weights are


def cut(first: int, size: int, partition: int, base: int) -> Iterator[Fragment]:
    """Yields the fragments of a weight that is elements [first, first + size) of its bucket, by ascending rank.

    partition: elements of the bucket that each rank owns. base: where they begin among all elements that the rank owns.
    """
    for rank in range(first // partition, (first + size - 1) // partition + 1):
        begin, end = max(first, rank * partition), min(first + size, (rank + 1) * partition)
        yield Fragment(rank, begin - first, base + begin - rank * partition, end - begin)


class DirectGradients:
    """The gradients of a step, by bucket and weight, and what the other ranks have sent of theirs."""

    def __init__(
        self, peers: Peers | Processes, partitions: Sequence[int], places: Sequence[Sequence[tuple[int, int]]]
    ) -> None:
        """Collective.

        partitions: by bucket, the elements of each rank's partition. places: by bucket and weight, its first element in the
        bucket and its size.
        """
        bases = [0]
        for partition in partitions:
            bases.append(bases[-1] + -(-partition // ALIGNED_ELEMENTS) * ALIGNED_ELEMENTS)
        self.rank = peers.rank
        self.pushes = pushes_of(peers, bases[-1])
        self.gradients: dict[tuple[int, int], Tensor] = {}  # kept until the update has been launched (`clear`)
        self.plans, self.own, self.received = {}, {}, {}
        for bucket, (partition, base, weights) in enumerate(zip(partitions, bases[:-1], places, strict=True)):
            for weight, (first, size) in enumerate(weights):
                fragments = list(cut(first, size, partition, base))
                self.plans[bucket, weight] = self.pushes.plan(fragments)
                for rank, start, place, length in fragments:
                    if rank == self.rank:
                        self.own[bucket, weight] = start, length
                        self.received[bucket, weight] = [part[place : place + length] for part in self.pushes.received]

    def keep(self, bucket: int, weight: int, gradient: Tensor) -> None:
        """Takes over the gradient [n] of a weight, bf16, and nothing else may write to it."""
        assert gradient.dtype == torch.bfloat16, gradient.dtype
        self.gradients[bucket, weight] = gradient

    def push(self, bucket: int, weight: int) -> None:
        """Starts to send a gradient that has been kept."""
        self.pushes.push(self.gradients[bucket, weight], self.plans[bucket, weight])

    def finish(self, push_all: bool = False) -> None:
        """Waits until all ranks have sent all gradients. Collective. push_all: whether none has been sent yet."""
        for key in self.gradients if push_all else ():
            self.push(*key)
        self.pushes.finish()

    def own_parts(self, bucket: int, weight: int) -> list[Tensor]:
        """Returns what this rank's partition has of a weight's gradients, by rank: [n] bf16 each."""
        start, size = self.own[bucket, weight]
        parts = list(self.received[bucket, weight])
        parts[self.rank] = self.gradients[bucket, weight].narrow(0, start, size)
        return parts

    def clear(self) -> None:
        """Lets the gradients go, after the update has been launched."""
        self.gradients.clear()

    def close(self) -> None:
        """Gives the memory back in which the other ranks write. Collective."""
        self.received.clear()
        self.pushes.close()
