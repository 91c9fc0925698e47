"""Threads in place of GPUs, for tests of the exchanges by copy engines.

The commands of a stream run at once here, in the thread of their rank.
"""

import ctypes
import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from ssscale.parallel import copies
from ssscale.parallel.copies import Peers


class Memory:
    """What `copies.Driver` does, with this process's memory."""

    patience = 20.0  # seconds that a rank waits for a flag

    def __init__(self, chance: random.Random) -> None:
        self.chance = chance

    def _delay(self) -> None:
        if self.chance.random() < 0.1:
            time.sleep(2e-3)

    def copy(self, to: int, source: int, size: int, stream: int) -> None:
        self._delay()
        ctypes.memmove(to, source, size)

    def set_flag(self, stream: int, flag: int, value: int, _: int) -> None:
        self._delay()
        ctypes.c_int32.from_address(flag).value = value

    def wait_for_flag(self, stream: int, flag: int, value: int, _: int) -> None:
        end = time.monotonic() + self.patience
        while ctypes.c_int32.from_address(flag).value < value:
            assert time.monotonic() < end, "the flag was never set"
            time.sleep(1e-6)

    def record(self, *_: int) -> None: ...

    def wait_for(self, *_: int) -> None: ...


class Place:
    """Where the threads meet."""

    def __init__(self, ranks: int) -> None:
        self.ranks, self.barrier, self.tensors = ranks, threading.Barrier(ranks, timeout=20), [torch.empty(0)] * ranks


class Thread(Peers):
    def __init__(self, place: Place, rank: int) -> None:
        class Group:
            """What `Peers` asks of its group."""

            def rank(self) -> int:
                return rank

            def size(self) -> int:
                return place.ranks

        self.place = place
        super().__init__(cast(dist.ProcessGroup, Group()), torch.device("cpu"))

    def _prepare(self) -> Any:
        return Memory(random.Random(self.rank)), None, [SimpleNamespace(cuda_event=0)] * (1 + copies.SLOTS)

    def share(self, size: int, dtype: torch.dtype) -> list[Tensor]:
        self.place.tensors[self.rank] = torch.zeros(size, dtype=dtype)
        self.place.barrier.wait()
        found = list(self.place.tensors)
        self.place.barrier.wait()
        return found

    def meet(self) -> None:
        self.place.barrier.wait()

    def _current(self) -> int:
        return 0

    def _started(self) -> Any:
        return None


def on_threads(ranks: int, work: Callable[[Thread], Any]) -> list[Any]:
    place = Place(ranks)
    with ThreadPoolExecutor(ranks) as pool:
        return list(pool.map(lambda rank: work(Thread(place, rank)), range(ranks)))
