"""Gradients sent by copy engines from where autograd has put them (`Pushes`). Neither sums nor slots: the receiver adds.

Every one of R ranks owns `size` elements of the flat gradients, and updates their weights with the sum over all ranks. It
shares memory for R − 1 copies of these elements, one that each other rank writes: 2 · (R − 1) · size bytes in bf16. A step of
one microbatch then runs as follows. All copies, flags and waits are in the side stream, that of `Peers`:

    backward   whenever a gradient is there: the side stream waits for it, and copies each other rank's piece to that rank
    `finish`   sets a flag of each other rank, and waits for theirs; then the compute stream waits for all of this
    update     in the compute stream: reads the own piece and what the other ranks have sent, and adds them in their order
    gather     of the updated weights (`Peers.start_filling`), in the same side stream

**When memory is there to read.** A rank's flag comes after all of its copies, in the order of its stream. Who has seen the
flags of all ranks has their pieces.

**When it may be written again** needs no flags of its own. Between `finish` and the pushes of the next step, each rank must
make one exchange with each other rank that starts after its update: the gather. Let s push to r. The pushes of s stand in
its side stream behind its gather, which waits for the flag of r. This flag stands in the side stream of r behind a wait for
r's compute stream, at a place after the update. So r has read when s writes. What the forward pass waits for does not matter,
nor whether the next pass is an evaluation. Steps that are skipped for NaN gather as well. `Exchange.begin` asserts the gather.

**When a gradient's own memory is free.** The compute stream waits for the copies in `finish`, and reads the own piece in the
update. A caller that keeps the tensors until the update has been launched may then let them go: the allocator gives
their memory to later work of the compute stream.
"""

import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ssscale.parallel.copies import Peers, Processes

DTYPE = torch.bfloat16
WIDTH = 2  # bytes of an element


class Fragment(NamedTuple):
    """What a rank owns of a gradient: elements [start, start + size) of it, [place, place + size) of the rank's elements."""

    rank: int
    start: int
    place: int
    size: int


class Pushes:
    """received: by rank, what it has sent [size] bf16, valid from `finish` until the next gather; empty for this rank."""

    def __init__(self, peers: Peers, size: int) -> None:
        """size: elements that a rank owns, the same on all ranks. Collective."""
        self.peers, self.size = peers, size
        if peers.device.type == "cuda":
            torch.cuda.empty_cache()  # memory to share does not come from torch's allocator, which may hold too much
        shared = peers.share((peers.ranks - 1) * size, DTYPE)  # by rank
        self.bases = [memory.data_ptr() + WIDTH * size * self._region(rank) for rank, memory in enumerate(shared)]
        self.shared = shared  # keeps what `bases` points to
        own, rank = shared[peers.rank], peers.rank
        regions = [(other - rank - 1) % peers.ranks for other in range(peers.ranks)]
        self.received = [own[:0] if i == rank else own[n * size : (n + 1) * size] for i, n in enumerate(regions)]

    def _region(self, rank: int) -> int:
        """Which region of that rank's memory is for what this rank sends; for this rank itself, one that is not there."""
        return (self.peers.rank - rank - 1) % self.peers.ranks

    def plan(self, fragments: Sequence[Fragment]) -> list[tuple[int, int, int]]:
        """Returns what `push` needs for the fragments of a gradient: target addresses, first bytes and numbers of bytes."""
        return [
            (self.bases[rank] + WIDTH * place, WIDTH * start, WIDTH * size)
            for rank, start, place, size in fragments
            if rank != self.peers.rank
        ]

    def push(self, gradient: Tensor, plan: list[tuple[int, int, int]]) -> None:
        """Sends the pieces of a gradient [n] bf16 that the current stream has computed. The caller keeps it until `finish`."""
        if not plan:
            return
        peers = self.peers
        peers.begin()
        copy, address, stream = peers.driver.copy, gradient.data_ptr(), peers.side
        for target, start, size in plan:
            copy(target, address + start, size, stream)

    def finish(self) -> None:
        """Lets the current stream wait until all ranks have sent everything, and this rank's gradients have been read."""
        self.peers.signal()()

    def close(self) -> None:
        """Gives the memory back. Collective."""
        self.peers.meet()
        self.received, self.shared = [], []


class ProcessPushes:
    """The same between processes on CPUs, by gloo. Whatever is read too early or too late is NaN.

    Gradients are only read in `finish`, as late as copy engines may. It fails if the caller has let one go before.
    """

    def __init__(self, processes: Processes, size: int) -> None:
        self.processes, self.size, ranks = processes, size, processes.ranks
        self.memory = torch.full((ranks, size), torch.nan, dtype=DTYPE)
        self.received = [own[: 0 if rank == processes.rank else size] for rank, own in enumerate(self.memory)]
        self.pushed: list[tuple[Any, Sequence[Fragment]]] = []

    def plan(self, fragments: Sequence[Fragment]) -> list[Fragment]:
        return [fragment for fragment in fragments if fragment.rank != self.processes.rank]

    def push(self, gradient: Tensor, plan: list[Fragment]) -> None:
        if plan and not self.pushed:
            self.memory.fill_(torch.nan)
        self.pushed.append((weakref.ref(gradient), plan))

    def finish(self) -> None:
        sent = torch.full_like(self.memory, torch.nan)
        for reference, plan in self.pushed:
            gradient = reference()
            assert gradient is not None, "a gradient was let go before it was sent"
            for rank, start, place, size in plan:
                sent[rank, place : place + size] = gradient[start : start + size]
        dist.all_to_all_single(self.memory, sent, group=self.processes.group)
        self.pushed = []

    def close(self) -> None:
        self.received = []


def pushes_of(peers: Peers | Processes, size: int) -> Any:
    """Returns the `Pushes` of GPUs or the `ProcessPushes` of CPUs. Collective."""
    return Pushes(peers, size) if isinstance(peers, Peers) else ProcessPushes(peers, size)
