"""The flags and slots of exchanges by copy engines (`ssscale.parallel.copies`), and whose turn it is to use them."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from ssscale.parallel.copies import Peers

SLOTS = 2
RECORDED = 2**13  # exchanges that graphs may record
AT_LEAST, EQUAL = 0, 1  # CU_STREAM_WAIT_VALUE_GEQ, of the difference modulo 2³², and CU_STREAM_WAIT_VALUE_EQ


class Turns:
    """Exchanges are numbered from 1. Each rank has a flag for each rank, which is set to the number of the exchange."""

    def __init__(self, peers: "Peers", sets: int = 1) -> None:
        """sets: of flags. Collective."""
        self.peers, self.number = peers, 0
        rank, ranks = peers.rank, peers.ranks
        self.flags = peers.share(sets * ranks, torch.int32)  # by rank, its flags
        addresses = [flags.data_ptr() for flags in self.flags]
        self.there = [address + 4 * rank for address in addresses]  # by rank, its flag for this rank
        self.here = [addresses[rank] + 4 * other for other in range(ranks)]  # this rank's flags
        self.slots: list[Tensor] = []  # by rank, [SLOTS, bytes]
        self.addresses: list[list[int]] = []  # of the slots, by number modulo SLOTS and rank
        self.views: dict[Any, Tensor] = {}  # of slots of this rank

    @property
    def size(self) -> int:
        """Bytes of a slot."""
        return self.slots[0].shape[1] if self.slots else 0

    def make_slots(self, size: int) -> None:
        """Makes slots of `size` bytes. Collective."""
        peers = self.peers
        peers.meet()
        self.slots = [slots.view(SLOTS, size) for slots in peers.share(SLOTS * size, torch.uint8)]
        self.addresses = [[slots[i].data_ptr() for slots in self.slots] for i in range(SLOTS)]
        self.views.clear()

    def next(self, size: int) -> list[int]:
        """Counts the exchange and returns the addresses of its slots, by rank.

        size: bytes that it may put into a slot; all ranks have the same.
        """
        if size > self.size:
            self.make_slots(-(-size // 512) * 512)
        self.number += 1
        return self.addresses[self.number % SLOTS]

    def received(self, piece: int, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Returns a piece of this rank's slot in the current exchange.

        piece: how many pieces of that size come before it: the sender's rank, as all ranks send as much to a slot.
        """
        key = self.number % SLOTS, piece, shape, dtype
        found = self.views.get(key)
        if found is None:
            size = math.prod(shape) * dtype.itemsize
            bytes_ = self.slots[self.peers.rank][self.number % SLOTS, piece * size : (piece + 1) * size]
            found = self.views[key] = bytes_.view(dtype).view(shape)
        return found

    def raise_flag(self, rank: int) -> None:
        """Sets this rank's flag of another rank."""
        self.peers.driver.set_flag(self.peers.side, self.there[rank], self.number, 0)

    def await_flag(self, rank: int) -> None:
        """Lets the stream of exchanges wait for the flag of another rank."""
        self.peers.driver.wait_for_flag(self.peers.side, self.here[rank], self.number, AT_LEAST)


class RecordedTurns(Turns):
    """Exchanges in CUDA graphs, which repeat what they have recorded, also the number that they write to a flag.

    So each exchange has flags of its own. 1 is written, and the rank that has seen it writes 0. The next 1 comes later: who
    raises it has seen a flag of a later exchange, which the other rank's stream raises after it has written the 0.

    **Slots.** Every graph has an even number of exchanges. So two consecutive ones take different slots also where one
    graph follows another, in any order, which is all that the argument in `copies` needs. Exchanges outside of graphs have
    other slots.
    """

    def __init__(self, peers: "Peers", size: int) -> None:
        super().__init__(peers, 1 + RECORDED)
        self.make_slots(size)

    def next(self, size: int) -> list[int]:
        assert size <= self.size, f"an exchange of {size} bytes in a slot of {self.size}"
        assert self.number < RECORDED, "graphs with too many exchanges"
        return super().next(size)

    def raise_flag(self, rank: int) -> None:
        self.peers.driver.set_flag(self.peers.side, self.there[rank] + self._place, 1, 0)

    def await_flag(self, rank: int) -> None:
        here = self.here[rank] + self._place
        self.peers.driver.wait_for_flag(self.peers.side, here, 1, EQUAL)
        self.peers.driver.set_flag(self.peers.side, here, 0, 0)

    @property
    def _place(self) -> int:
        return 4 * self.peers.ranks * self.number
