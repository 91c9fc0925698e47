"""Transfers of keys and values between the ranks of a ring, which run while the ranks compute."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from ssscale.parallel.groups import Groups


class Transfer:
    """Sends tensors to ranks of the ring and receives others. Starts on construction; `wait` finishes it."""

    def __init__(self, groups: Groups, sent: Sequence[tuple[Tensor, int]], received: Sequence[tuple[Tensor, int]]):
        """sent, received: pairs of a contiguous tensor and the peer's rank in the ring."""
        group = groups.ring_group
        ops = [dist.P2POp(dist.isend, x, group=group, group_peer=peer) for x, peer in sent]
        ops += [dist.P2POp(dist.irecv, x, group=group, group_peer=peer) for x, peer in received]
        self.kept = [x for x, _ in sent]
        self.works = dist.batch_isend_irecv(ops) if ops else []

    def wait(self) -> None:
        for work in self.works:
            work.wait()
        self.kept.clear()


class RingShift(Transfer):
    """Sends rank r's tensor to rank r + distance. `result` returns the tensor of rank r − distance."""

    def __init__(self, x: Tensor, groups: Groups, distance: int = 1):
        size, rank = groups.ring_size, groups.ring_rank
        if distance % size == 0:
            self.found = x
            super().__init__(groups, [], [])
            return
        self.found = torch.empty_like(x)
        super().__init__(groups, [(x, (rank + distance) % size)], [(self.found, (rank - distance) % size)])

    def result(self) -> Tensor:
        self.wait()
        return self.found


class LineShift(Transfer):
    """Moves all 2R chunks of keys by one place along the line of chunks, and the last one to the first place.

    The chunk at place i moves to place i + 1, where the queries of chunk i + 1 are. Rank r holds places r and 2R − 1 − r, so
    the line goes up the ranks and down again. `back` moves the chunks in the other direction.
    """

    def __init__(self, places: tuple[Tensor, Tensor], groups: Groups, back: bool = False):
        last, rank = groups.ring_size - 1, groups.ring_rank
        self.back = back
        up, down = places[::-1] if back else places
        sent, received = [], []
        self.up, self.down = down, up  # at its two ends the line turns within a rank
        if rank > 0:
            self.up = torch.empty_like(up)
            sent.append((down, rank - 1))
            received.append((self.up, rank - 1))
        if rank < last:
            self.down = torch.empty_like(down)
            sent.append((up, rank + 1))
            received.append((self.down, rank + 1))
        super().__init__(groups, sent, received)

    def result(self) -> tuple[Tensor, Tensor]:
        self.wait()
        return (self.down, self.up) if self.back else (self.up, self.down)
