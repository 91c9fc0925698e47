"""Exchanges of tokens between the GPUs of one host by their copy engines, which leave all multiprocessors to products.

NCCL's kernels need multiprocessors. A matrix product takes all of them, so a collective beside a product waits until the
product has ended, or the product waits for the collective (docs/log/2026-11-25-two-gpus.md). A copy engine needs none, nor
does the command processor, which sets and awaits the flags here (`cuStreamWriteValue32`, `cuStreamWaitValue32`).

Each rank has two slots in memory that all ranks of the group can read and write, and a flag for each rank. Exchanges are
numbered from 1, the same on all ranks, and take the slots in turn. All copies and waits are in one stream per rank:

    gather n     copies x to the slot of each other rank, and sets the flag there to n; waits for all flags;
                 then copies x and what has arrived to one tensor
    scatter n    copies the rows of each other rank to that rank's slot, and sets the flag there to n; waits for all flags;
                 then copies what the first of them has sent to a tensor, if there is one for it

The compute stream reads what has arrived in the slot, and none of the copies is in its way.

**No slot is overwritten too early.** A rank that has seen all flags n knows that every other rank's stream has done all of
exchange n − 1 and that its compute stream has read what it received in it, because it reads that before the next exchange
starts. So the slot of exchange n − 1 is free for exchange n + 1.

A scatter may start between a gather and its `whole`. Nothing else may start between the start and the last wait of an
exchange.

`signal` is an exchange of nothing: only its flags (`ssscale.parallel.pushes`).

Within `recording`, exchanges become part of a CUDA graph. They have flags and slots of their own (`ssscale.parallel.turns`).

`start_reduction` and `start_filling` are made of such exchanges, of at most `CHUNK` bytes for each slot. They do all of their
work in the one stream, also the sums, so any number of them may be started before the first is waited for. `start_filling`
pulls: each rank copies its piece to its own slot, sets its flag of each other rank, and they copy from there to where
it belongs.
"""

import ctypes
import functools
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from ssscale_kernels.sums import sum_in_order
from torch import Tensor

from ssscale.errors import UserError
from ssscale.parallel.exchange import gather_json
from ssscale.parallel.turns import SLOTS, RecordedTurns, Turns

CHUNK = 2**25  # bytes
EVENTS = 2 + SLOTS  # of a rank: `begin`, the arrival of a gather, and by slot the end of an exchange


def part(x: Tensor, rank: int, ranks: int) -> Tensor:
    """Returns the rows of a rank. x: [T, D], whose rows are divided evenly."""
    rows = len(x) // ranks
    return x[rank * rows : (rank + 1) * rows]


def others(rank: int, ranks: int) -> Iterator[int]:
    """Returns the other ranks from the next one on, so that no two ranks begin with the same one."""
    return (other % ranks for other in range(rank + 1, rank + ranks))


def add_up(parts: Sequence[Tensor], own: Tensor) -> None:
    """Writes the sum of the tensors, in their order, to `own`, which may be one of them.

    own: of the dtype of the tensors, or float32. Sums are in float32 and rounded once.
    """
    if len(parts) == 2 and own.dtype == parts[0].dtype:
        torch.add(*parts, out=own)  # the same, and takes the host less time
    else:
        sum_in_order(parts, own)


class Driver:
    """The functions of CUDA's driver that are used here. They take handles of streams and events, and addresses.

    torch's own calls for streams, events and copies take several times as long on the host, which launches thousands of
    these per step. Each function raises RuntimeError if CUDA refuses it.
    """

    def __init__(self) -> None:
        library = ctypes.CDLL("libcuda.so.1")
        handle, address, number = ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint
        self.copy = self._function(library.cuMemcpyDtoDAsync_v2, address, address, ctypes.c_size_t, handle)
        self.set_flag = self._function(library.cuStreamWriteValue32_v2, handle, address, ctypes.c_uint32, number)
        self.wait_for_flag = self._function(library.cuStreamWaitValue32_v2, handle, address, ctypes.c_uint32, number)
        self.record = self._function(library.cuEventRecord, handle, handle)
        self.wait_for = self._function(library.cuStreamWaitEvent, handle, handle, number)

    @staticmethod
    def _function(function: Any, *types: Any) -> Callable[..., Any]:
        def check(result: int, *_: Any) -> None:
            if result:
                raise RuntimeError(f"{function.__name__} failed with CUDA error {result}")

        function.argtypes, function.restype, function.errcheck = types, ctypes.c_int, check
        called: Callable[..., Any] = function
        return called


class CannotCopyError(UserError):
    """GPUs cannot access each other's memory. obstacle: why."""

    def __init__(self, obstacle: str) -> None:
        super().__init__(f"parallel.copy_engines=true: {obstacle}: use parallel.copy_engines=false")
        self.obstacle = obstacle


class Gathering(NamedTuple):
    """A gather that has been started. The results of the calls are valid in the current stream, which waits for them.

    x: this rank's rows [T / R, D], which the exchange reads until `whole` is called. It has to be called.
    arrived: returns the rows of all other ranks, [T, D] with this rank's rows undefined. They may be read until the next
        exchange starts.
    whole: returns the rows of all ranks [T, D], or without `fill` what `arrived` does.
    """

    x: Tensor
    arrived: Callable[[], Tensor]
    whole: Callable[[], Tensor]


class Peers:
    """The slots and flags of the ranks of a group. GPUs of one host, each of which can access the others' memory."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self.group, self.device, self.rank, self.ranks = group, device, group.rank(), group.size()
        self.others = list(others(self.rank, self.ranks))
        self.driver, self.stream, self.events = self._prepare()
        self.side: int = self.stream.cuda_stream if self.stream is not None else 0
        self.begun, self.arrived, *self.done = (event.cuda_event for event in self.events)
        self.turns = self.usual = Turns(self)

    def _prepare(self) -> tuple[Any, torch.cuda.Stream | None, Sequence[Any]]:
        """Returns the driver, the stream of all exchanges, and events. Raises CannotCopyError on several hosts."""
        hosts = sorted(set(gather_json(socket.gethostname(), self.group)))
        if len(hosts) > 1:
            raise CannotCopyError(
                f"copy engines serve GPUs of one host, and {hosts[0]} and {hosts[1]} exchange with each other"
            )
        events = [torch.cuda.Event() for _ in range(EVENTS)]
        for event in events:
            event.record()  # creates it
        return Driver(), torch.cuda.Stream(self.device, priority=-1), events

    def share(self, size: int, dtype: torch.dtype) -> list[Tensor]:
        """Returns a tensor of zeros of each rank, which all ranks of the group can read and write. Collective.

        Raises CannotCopyError on all ranks if it fails on one.
        """
        from torch.distributed import _symmetric_memory

        own, failed, found = _symmetric_memory.empty(size, dtype=dtype, device=self.device), None, None
        try:
            found = _symmetric_memory.rendezvous(own, self.group.group_name)
        except RuntimeError as error:
            failed = str(error).splitlines()[0]
        for rank, reason in enumerate(gather_json(failed, self.group)):
            if reason is not None:
                raise CannotCopyError(f"GPU {rank} of {self.ranks} cannot share memory with the others ({reason})")
        assert found is not None
        own.zero_()
        self.meet()
        return [own if i == self.rank else found.get_buffer(i, (size,), dtype) for i in range(self.ranks)]

    def meet(self) -> None:
        """Waits until all ranks have done all that they have launched."""
        torch.cuda.synchronize(self.device)
        dist.all_reduce(torch.zeros(1, device=self.device), group=self.group)
        torch.cuda.synchronize(self.device)

    @contextmanager
    def recording(self) -> Iterator[RecordedTurns]:
        """Within it, exchanges may be recorded in CUDA graphs, and are not made. Collective.

        None of them may be larger than all that have been made before. The graphs need what this yields.
        """
        self.turns = recorded = RecordedTurns(self, self.usual.size)
        try:
            yield recorded
        finally:
            self.turns = self.usual

    def _current(self) -> int:
        """Returns the handle of the current stream."""
        handle: int = torch._C._cuda_getCurrentRawStream(self.device.index)
        return handle

    def begin(self) -> int:
        """Lets the exchanges wait for what has been launched in the current stream, whose handle it returns."""
        current = self._current()
        self.driver.record(self.begun, current)
        self.driver.wait_for(self.side, self.begun, 0)
        return current

    def _pull(self, slots: list[int], parts: list[int], size: int) -> None:
        """Copies `size` bytes from the slot of each other rank to the address `parts` of it."""
        for rank in self.others:
            self.turns.raise_flag(rank)
        for rank in self.others:
            self.turns.await_flag(rank)
            self.driver.copy(parts[rank], slots[rank], size, self.side)

    def _push(self, slots: list[int], parts: list[int], size: int) -> None:
        """Copies `size` bytes from the address `parts` of each other rank to its slot, and waits for theirs."""
        for rank in self.others:
            self.driver.copy(slots[rank] + self.rank * size, parts[rank], size, self.side)
            self.turns.raise_flag(rank)
        for rank in self.others:
            self.turns.await_flag(rank)

    def _end(self, current: int) -> Callable[[], None]:
        """Returns a function that lets the stream with the handle `current` wait for the exchange."""
        done = self.done[self.turns.number % SLOTS]
        self.driver.record(done, self.side)
        return lambda: self.driver.wait_for(current, done, 0)

    def gather(self, x: Tensor, fill: bool = True) -> Gathering:
        """Starts to gather x [T / R, D] of all ranks, which is contiguous.

        fill: whether a tensor of all rows is needed longer than the slot.
        """
        size, rank, ranks = x.numel() * x.element_size(), self.rank, self.ranks
        slots, source = self.turns.next(size * ranks), x.data_ptr()
        shape = len(x) * ranks, *x.shape[1:]
        landed = self.turns.received(0, shape, x.dtype)
        whole = x.new_empty(shape) if fill else landed
        current = self.begin()
        self._push(slots, [source] * ranks, size)
        self.driver.record(self.arrived, self.side)
        if fill:
            self._fill(whole.data_ptr(), slots[rank], source, size)
        wait = self._end(current)

        def arrived() -> Tensor:
            self.driver.wait_for(current, self.arrived, 0)
            return landed

        def finish() -> Tensor:
            wait()
            return whole

        return Gathering(x, arrived, finish)

    def _fill(self, target: int, slot: int, source: int, size: int) -> None:
        """Copies to the address `target` what has arrived in the slot, and in its place `size` bytes of this rank."""
        self.driver.copy(target + self.rank * size, source, size, self.side)
        for first, last in ((0, self.rank), (self.rank + 1, self.ranks)):
            if first < last:
                self.driver.copy(target + first * size, slot + first * size, (last - first) * size, self.side)

    def scatter(self, x: Tensor, total: Tensor | None = None) -> Callable[[], list[Tensor]]:
        """Starts to send each other rank its rows of x [T, D]. This rank's own rows may be written later.

        The result of the call waits for the rows of this rank from the other ranks, and returns them as [T / R, D] each, by
        rank in ascending order. They may be read until the next exchange starts. total: a tensor that the first of them are
        copied to, and that takes their place in the result. It may be read and written at any time after that.
        """
        size = x.numel() * x.element_size() // self.ranks
        slots, source = self.turns.next(size * self.ranks), x.data_ptr()
        current = self.begin()
        self._push(slots, [source + rank * size for rank in range(self.ranks)], size)
        shape = len(x) // self.ranks, *x.shape[1:]
        received = [self.turns.received(rank, shape, x.dtype) for rank in sorted(self.others)]
        if total is not None:
            self.driver.copy(total.data_ptr(), received[0].data_ptr(), size, self.side)
            received[0] = total
        wait = self._end(current)

        def finish() -> list[Tensor]:
            wait()
            return received

        return finish

    def start_reduction(self, own: Tensor, whole: Tensor) -> "Started":
        """Starts to sum `whole` [n] over the ranks into `own` [n / R].

        own: the view of `whole` with this rank's part, or other memory, then also float32.
        """
        self.begin()
        most = CHUNK // whole.element_size()
        with torch.cuda.stream(self.stream):
            for first in range(0, len(own), most):
                chunks = [part(whole, rank, self.ranks)[first : first + most] for rank in range(self.ranks)]
                mine = chunks[self.rank]
                slots = self.turns.next(CHUNK * self.ranks)
                self._push(slots, [chunk.data_ptr() for chunk in chunks], mine.numel() * mine.element_size())
                received = [
                    mine if rank == self.rank else self.turns.received(rank, mine.shape, mine.dtype)
                    for rank in range(self.ranks)
                ]
                add_up(received, own[first : first + most])
        return self._started()

    def start_filling(self, whole: Tensor, own: Tensor) -> "Started":
        """Starts to fill `whole` [n] with `own` [n / R] of each rank, which is a view of it."""
        self.begin()
        share, address = own.numel() * own.element_size(), whole.data_ptr()
        for first in range(0, share, CHUNK):
            size = min(CHUNK, share - first)
            slots = self.turns.next(CHUNK * self.ranks)
            self.driver.copy(slots[self.rank], own.data_ptr() + first, size, self.side)
            self._pull(slots, [address + rank * share + first for rank in range(self.ranks)], size)
        return self._started()

    def signal(self) -> Callable[[], None]:
        """Lets the ranks wait for each other, an exchange of nothing.

        The result of the call lets the current stream wait for what all ranks have launched before in the stream of exchanges.
        """
        self.turns.number += 1
        current = self.begin()
        for rank in self.others:
            self.turns.raise_flag(rank)
        for rank in self.others:
            self.turns.await_flag(rank)
        return self._end(current)

    def _started(self) -> "Started":
        assert self.stream is not None
        return Started(self.stream.record_event())


class Started:
    """An exchange that has been started. `wait` lets the current stream wait for it, as `dist.Work` does."""

    def __init__(self, done: torch.cuda.Event | None) -> None:
        """done: None if the exchange has ended."""
        self.done = done

    def wait(self) -> None:
        if self.done is not None:
            torch.cuda.current_stream().wait_event(self.done)


class Processes:
    """The same exchanges between processes on CPUs, by gloo. They end before the call returns."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self.group, self.rank, self.ranks = group, group.rank(), group.size()
        self.others = list(others(self.rank, self.ranks))

    def gather(self, x: Tensor, fill: bool = True) -> Gathering:
        whole = x.new_empty(len(x) * self.ranks, *x.shape[1:])
        dist.all_gather_into_tensor(whole, x, group=self.group)
        landed = whole.clone()
        part(landed, self.rank, self.ranks).fill_(torch.nan)
        return Gathering(x, lambda: landed, lambda: whole if fill else landed)

    def scatter(self, x: Tensor, total: Tensor | None = None) -> Callable[[], list[Tensor]]:
        sent = x.clone()
        part(sent, self.rank, self.ranks).fill_(torch.nan)  # not there yet: must not be read
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=self.group)
        found = [part(received, rank, self.ranks) for rank in sorted(self.others)]
        if total is not None:
            found[0] = total.copy_(found[0])
        return lambda: found

    def start_reduction(self, own: Tensor, whole: Tensor) -> "Started":
        received = torch.empty_like(whole)
        dist.all_to_all_single(received, whole, group=self.group)
        add_up(received.chunk(self.ranks), own)
        return Started(None)

    def start_filling(self, whole: Tensor, own: Tensor) -> "Started":
        dist.all_gather_into_tensor(whole, own.clone(), group=self.group)
        return Started(None)


@functools.cache
def peers_of(group: dist.ProcessGroup, device: torch.device) -> Any:
    """Returns the `Peers` of a process group, or `Processes` on CPUs. On GPUs, its first call is collective.

    Raises CannotCopyError if GPUs cannot access each other's memory.
    """
    return (Peers if device.type == "cuda" else Processes)(group, device)


def obstacle(group: dist.ProcessGroup, device: torch.device) -> str | None:
    """Returns why the ranks of a group cannot exchange by copy engines, or None if they can. Collective."""
    try:
        peers_of(group, device)
    except CannotCopyError as error:
        return error.obstacle
    return None


def peers(group: str, device: torch.device) -> Any:
    """As `peers_of`, by the name of the group."""
    return peers_of(dist.distributed_c10d._resolve_process_group(group), device)
