"""Threads in place of GPUs, for tests of the exchanges by copy engines.

The commands of a stream run at once, in the thread of their rank (`Thread`), or in the order of their stream, some time
after the rank has launched them, in a thread of the stream (`Lagging`).
"""

import ctypes
import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from ssscale.parallel import copies
from ssscale.parallel.copies import Peers

SIDE = 1  # the stream of exchanges


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


class Streams(Memory):
    """The same, with two streams: 0, in which the rank computes, and SIDE. A wait for an event waits for its last record."""

    def __init__(self, chance: random.Random) -> None:
        super().__init__(chance)
        self.queues = [ThreadPoolExecutor(1), ThreadPoolExecutor(1)]
        self.launched: list[Future[Any]] = []
        self.events: dict[int, threading.Event] = {}

    def launch(self, stream: int, command: Callable[..., Any], *arguments: Any) -> None:
        self.launched.append(self.queues[stream].submit(command, *arguments))

    def copy(self, to: int, source: int, size: int, stream: int) -> None:
        self.launch(stream, super().copy, to, source, size, stream)

    def set_flag(self, stream: int, *more: int) -> None:
        self.launch(stream, super().set_flag, stream, *more)

    def wait_for_flag(self, stream: int, *more: int) -> None:
        self.launch(stream, super().wait_for_flag, stream, *more)

    def record(self, event: int, stream: int) -> None:
        self.events[event] = threading.Event()
        self.launch(stream, self.events[event].set)

    def wait_for(self, stream: int, event: int, _: int) -> None:
        self.launch(stream, self._await, self.events[event])

    def _await(self, event: threading.Event) -> None:
        assert event.wait(self.patience), "the event was never recorded"

    def synchronize(self) -> None:
        for command in self.launched:
            command.result()
        self.launched = []


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
        return Memory(random.Random(self.rank)), None, [SimpleNamespace(cuda_event=0)] * copies.EVENTS

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


class Lagging(Thread):
    driver: Streams

    def __init__(self, place: Place, rank: int) -> None:
        super().__init__(place, rank)
        self.side = SIDE

    def _prepare(self) -> Any:
        events = [SimpleNamespace(cuda_event=number) for number in range(copies.EVENTS)]
        return Streams(random.Random(self.rank)), None, events

    def meet(self) -> None:
        self.driver.synchronize()
        super().meet()


def on_threads(ranks: int, work: Callable[[Any], Any], kind: type[Thread] = Thread) -> list[Any]:
    """Returns the results by rank. Raises what the first rank raised that did not fail because of another one."""
    place = Place(ranks)

    def run(rank: int) -> Any:
        try:
            return work(kind(place, rank))
        except Exception:  # of any kind: the other threads would wait at the barrier for this one
            place.barrier.abort()
            raise

    with ThreadPoolExecutor(ranks) as pool:
        done = [pool.submit(run, rank) for rank in range(ranks)]
    for error in (rank.exception() for rank in done):
        if error is not None and not isinstance(error, threading.BrokenBarrierError):
            raise error
    return [rank.result() for rank in done]
