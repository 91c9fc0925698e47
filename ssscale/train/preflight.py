"""`train.preflight`: checks and measures every device and every link before a run, within 20 seconds.

It refuses what is broken: a device or an exchange with wrong results, and ranks that do not answer. What works at less than
SLOW of the median is only named.
"""

import datetime
import json
import logging
import os
import queue
import socket
import statistics
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _get_default_store

from ssscale.config.choices import Auto
from ssscale.errors import STALLED, Stop, UserError
from ssscale.parallel.groups import Groups
from ssscale.train.hooks.guard import listed

logger = logging.getLogger("ssscale")

SLOW = 0.9  # of the median
ANSWER_S = 60.0  # seconds after which a rank that has not answered counts as unreachable
MEASURE_S = 1.5  # seconds for the matrix products of a device, and for its copies
EXCHANGES = 8  # timed all-reduces per group of ranks


@dataclass(frozen=True)
class Sizes:
    """matrix: rows and columns. products: per timing. copied, exchanged: bytes."""

    matrix: int
    products: int
    copied: int
    exchanged: int


ON_GPU = Sizes(matrix=4096, products=20, copied=2**30, exchanged=2**26)
ON_CPU = Sizes(matrix=256, products=1, copied=2**22, exchanged=2**18)


def wanted(setting: bool | Auto) -> bool:
    return "SLURM_JOB_ID" in os.environ if isinstance(setting, Auto) else setting


def preflight(setting: bool | Auto, groups: Groups) -> None:
    """Checks the devices and links of all ranks if `train.preflight` asks for it. All ranks call it together.

    Raises UserError on all ranks if a device or an exchange gives wrong results, and Stop if a rank does not answer.
    """
    if not wanted(setting):
        return
    began = time.perf_counter()
    sizes = ON_GPU if groups.device.type == "cuda" else ON_CPU
    desk = Desk(groups)
    desk.hosts = desk.gather("start", hostname())
    devices = desk.attempt("its device", lambda: check_device(groups.device, sizes))
    found = {
        "matrix products": ("TFLOP/s", {desk.name(rank): rate[0] / 1e12 for rank, rate in enumerate(devices)}),
        "memory copies": ("GB/s", {desk.name(rank): rate[1] / 1e9 for rank, rate in enumerate(devices)}),
    }
    nodes = nodes_of(desk.hosts)
    members = mine(nodes, groups.rank)
    within = desk.attempt("all-reduce within its node", partial(exchange, members, groups, sizes))
    found["all-reduce within a node"] = ("GB/s", by_node(nodes, within))
    between: dict[str, float] = {}
    for pairs in rounds(list(nodes)):
        members = mine({f"{a} and {b}": nodes[a] + nodes[b] for a, b in pairs}, groups.rank)
        rates = desk.attempt("all-reduce between nodes", partial(exchange, members, groups, sizes))
        for a, b in pairs:
            (rate,) = by_node({"": nodes[a] + nodes[b]}, rates).values()
            between |= {node: max(rate, between.get(node, 0.0)) for node in (a, b)}
    found["all-reduce between nodes"] = ("GB/s", between)
    if groups.device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    report(found, time.perf_counter() - began)


def hostname() -> str:
    return socket.gethostname()


class Desk:
    """Where ranks leave their findings, so that those that hang are noticed: the store of the rendezvous, on rank 0."""

    def __init__(self, groups: Groups) -> None:
        self.groups = groups
        self.store = dist.PrefixStore("preflight", _get_default_store())
        self.hosts: list[str] = []
        self.rounds = 0

    def name(self, rank: int) -> str:
        return f"rank {rank} on {self.hosts[rank]}" if self.hosts else f"rank {rank}"

    def gather(self, what: str, value: Any) -> list[Any]:
        """Returns the values of all ranks. Raises Stop if a rank has not given one within ANSWER_S seconds."""
        self.rounds += 1
        keys = [f"{self.rounds}/{rank}" for rank in range(self.groups.world_size)]
        together = f"{self.rounds}/all"
        self.store.set(keys[self.groups.rank], json.dumps(value))
        if self.groups.is_main:
            self._wait(keys, ANSWER_S)
            answers = [self.store.get(key).decode() if self.store.check([key]) else "" for key in keys]
            self.store.set(together, json.dumps(answers))
        elif not self._wait([together], 1.5 * ANSWER_S):
            raise Stop(f"preflight: {self.name(0)} does not answer after {what}: the same command continues", STALLED)
        answers = json.loads(self.store.get(together))
        silent = [self.name(rank) for rank, answer in enumerate(answers) if not answer]
        if silent:
            raise Stop(
                f"preflight: no answer within {ANSWER_S:g} s from {listed(silent)} ({what}): if the same command shows it "
                "again, exclude that host",
                STALLED,
            )
        return [json.loads(answer) for answer in answers]

    def attempt(self, what: str, work: Callable[[], Any]) -> list[Any]:
        """Returns the results of `work` by rank. Raises UserError on all ranks if it fails on any.

        It runs in a thread, because calls of CUDA and NCCL may hang where a device or link is broken.
        """
        done: queue.SimpleQueue[tuple[Any, str]] = queue.SimpleQueue()

        def run() -> None:
            try:
                if self.groups.device.type == "cuda":
                    torch.cuda.set_device(self.groups.device)
                done.put((work(), ""))
            except Exception as error:  # of any library: it is reported to all ranks
                done.put((None, str(error).split("\n")[0] or type(error).__name__))

        threading.Thread(target=run, name="preflight", daemon=True).start()
        try:
            result, problem = done.get(timeout=ANSWER_S / 2)
        except queue.Empty:
            result, problem = None, f"no end within {ANSWER_S / 2:g} s"
        answers = self.gather(what, [result, problem])
        broken = [f"{self.name(rank)}: {problem}" for rank, (_, problem) in enumerate(answers) if problem]
        if broken:
            raise UserError(
                f"preflight of {what} fails on {listed(broken)}: exclude the host, or train.preflight=false"
            )
        return [result for result, _ in answers]

    def _wait(self, keys: list[str], seconds: float) -> bool:
        try:
            self.store.wait(keys, datetime.timedelta(seconds=seconds))
        except dist.DistStoreError:
            return False
        return True


def check_device(device: torch.device, sizes: Sizes) -> tuple[float, float]:
    """Returns the rates of matrix products in FLOP/s and of memory copies in bytes/s, read and written.

    Raises ValueError if a result is wrong. The matrices hold −1, 0 and 1 so sparsely that bf16 holds the product exactly.
    """
    numbers = torch.Generator().manual_seed(0)
    n = sizes.matrix
    a, b = (torch.randint(-4, 4, (n, n), generator=numbers, dtype=torch.int8) for _ in range(2))
    a, b = (((x == 0).to(torch.int8) - (x == 1).to(torch.int8)) for x in (a, b))
    probe = torch.randint(0, 2, (n, 1), generator=numbers).double()
    expected = a.double() @ (b.double() @ probe)  # Freivalds (1977): A(Bx) = (AB)x, in float64 on the CPU
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    left, right = a.to(device, dtype), b.to(device, dtype)

    def products() -> Tensor:
        for _ in range(sizes.products):
            result = multiply(left, right)
        return result

    seconds = best_seconds(products, device)
    if not torch.equal(multiply(left, right).double().cpu() @ probe, expected):
        raise ValueError("wrong results of a matrix product")
    source = (torch.arange(sizes.copied // 8, device=device) * 1_000_003).view(torch.uint8)
    target = torch.zeros_like(source)
    copied = best_seconds(lambda: copy(target, source), device)
    if not torch.equal(target, source) or int(source.view(torch.int64)[-1]) != (sizes.copied // 8 - 1) * 1_000_003:
        raise ValueError("wrong bytes after a copy in memory")
    return 2.0 * n**3 * sizes.products / seconds, 2.0 * sizes.copied / copied


def multiply(left: Tensor, right: Tensor) -> Tensor:
    return left @ right


def copy(target: Tensor, source: Tensor) -> Tensor:
    return target.copy_(source)


def best_seconds(work: Callable[[], object], device: torch.device) -> float:
    """Returns the least seconds of several calls, which noise affects least. The first call is not timed."""
    work()
    end, best = time.perf_counter() + MEASURE_S, float("inf")
    for _ in range(10):
        best = min(best, timed(work, device))
        if time.perf_counter() > end:
            break
    return best


def timed(work: Callable[[], object], device: torch.device) -> float:
    synchronize(device)
    began = time.perf_counter()
    work()
    synchronize(device)
    return time.perf_counter() - began


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def exchange(ranks: Sequence[int], groups: Groups, sizes: Sizes) -> float:
    """Returns the bus bandwidth of all-reduce over these ranks in bytes/s: 2 (n − 1) / n of the tensor per time.

    0 if there are fewer than two ranks. Raises ValueError if the sum is wrong, after the last exchange, for which the other
    ranks wait.
    """
    n = len(ranks)
    if n < 2:
        return 0.0
    backend = "nccl" if groups.device.type == "cuda" else "gloo"
    group = dist.new_group(list(ranks), backend=backend, use_local_synchronization=True)
    pattern = torch.arange(sizes.exchanged // 4, device=groups.device).remainder(97).float()
    found = pattern + ranks.index(groups.rank)
    dist.all_reduce(found, group=group)
    right = torch.equal(found, n * pattern + n * (n - 1) // 2)
    found.zero_()
    work = [timed(lambda: dist.all_reduce(found, group=group), groups.device) for _ in range(EXCHANGES)]
    dist.destroy_process_group(group)
    if not right:
        raise ValueError(f"a wrong sum of an all-reduce over {n} ranks")
    return 2 * (n - 1) / n * sizes.exchanged / min(work)


def nodes_of(hosts: Sequence[str]) -> dict[str, list[int]]:
    """Returns the ranks of each host, in the order of their first ranks."""
    found: dict[str, list[int]] = {}
    for rank, host in enumerate(hosts):
        found.setdefault(host, []).append(rank)
    return found


def mine(groups: Mapping[str, Sequence[int]], rank: int) -> Sequence[int]:
    """Returns the group that has this rank, or nothing."""
    return next((ranks for ranks in groups.values() if rank in ranks), ())


def rounds(nodes: Sequence[str]) -> list[list[tuple[str, str]]]:
    """Returns rounds of pairs that do not overlap, in which each node meets both neighbors on a circle of all nodes.

    A slow node is slow with both; a node whose one neighbor is slow is fast with the other.
    """
    n = len(nodes)
    edges = [(nodes[i], nodes[(i + 1) % n]) for i in range(n)] if n > 2 else [(nodes[0], nodes[1])] if n == 2 else []
    last = edges[-1:] if n % 2 else []  # on an odd circle the last pair overlaps with both rounds
    even = edges[: len(edges) - len(last)]
    return [pairs for pairs in (even[::2], even[1::2], last) if pairs]


def by_node(nodes: Mapping[str, Sequence[int]], rates: Sequence[float]) -> dict[str, float]:
    """Returns the median rate of each node's ranks in GB/s, without those that were not measured."""
    medians = {node: statistics.median(rates[rank] for rank in ranks) / 1e9 for node, ranks in nodes.items()}
    return {node: rate for node, rate in medians.items() if rate}


def slow(rates: Mapping[str, float]) -> dict[str, float]:
    """Returns what is below SLOW of the median, with its share of the median."""
    median = statistics.median(rates.values()) if rates else 0.0
    return {name: rate / median for name, rate in rates.items() if rate < SLOW * median}


def report(found: Mapping[str, tuple[str, Mapping[str, float]]], seconds: float) -> None:
    """Logs the rates of each measurement, and what is slow."""
    said = []
    for what, (unit, rates) in found.items():
        if rates:
            least, most = min(rates.values()), max(rates.values())
            said.append(f"{what} {statistics.median(rates.values()):.3g} {unit} ({least:.3g} to {most:.3g})")
    logger.info("preflight in %.1f s, medians: %s", seconds, ", ".join(said))
    for what, (unit, rates) in found.items():
        for name, share in slow(rates).items():
            logger.warning("preflight: %s: %s at %.2f of the median (%.3g %s)", name, what, share, rates[name], unit)
