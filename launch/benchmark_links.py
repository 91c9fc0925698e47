"""Benchmark of the links between GPUs: time and bus bandwidth of collectives by size.

gpus=8 measures the GPUs of this machine. Under torchrun or srun (one task per GPU) it measures all of their machines, and
with one task per machine the network of a single GPU. The constants of launch/estimate.py nodes= come from these figures.

Bus bandwidth is what the slowest link carries: the bytes of the tensor times 2 (n - 1) / n for all-reduce, times
(n - 1) / n for reduce-scatter, all-gather and all-to-all, and times 1 for send/recv around a ring, per second. The tensor is
the whole one: the input of reduce-scatter, the output of all-gather. Latency is the time of the smallest size.
"""

import os
import time
import warnings
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from launch import boot, workers
from launch.boot import Command, Option

if TYPE_CHECKING:
    import torch

COMMAND = Command(
    about=__doc__,
    usage="python launch/benchmark_links.py [gpus=N] [largest=MIB]",
    example="python launch/benchmark_links.py gpus=8",
    options=(
        *workers.OPTIONS,
        Option("largest", int, "MiB of the largest tensor", default=1024, at_least=1),
    ),
)
SMALLEST, STEP = 2**10, 16  # bytes, and the factor from one size to the next
KINDS = ("all-reduce", "reduce-scatter", "all-gather", "all-to-all", "send/recv")
SENT = 2**30  # bytes of all calls of one size together, within the limits
LEAST_CALLS, MOST_CALLS = 5, 100


def bus_bytes(kind: str, size: int, ranks: int) -> float:
    """Returns the bytes that each link of a ring of ranks carries for a tensor of `size` bytes (NVIDIA's nccl-tests)."""
    if kind == "send/recv":
        return size
    return (2 if kind == "all-reduce" else 1) * (ranks - 1) / ranks * size


def sizes(largest: int) -> list[int]:
    """Returns the sizes up to `largest` bytes, each STEP times the one before, and `largest`."""
    found = [SMALLEST * STEP**i for i in range(8)]
    return [*(size for size in found if size < largest), largest]


def call_of(kind: str, size: int, device: "torch.device") -> Callable[[], object]:
    """Returns a call of one collective over all ranks on bf16 tensors of `size` bytes."""
    import torch
    import torch.distributed as dist

    rank, ranks = dist.get_rank(), dist.get_world_size()
    share = torch.zeros(max(1, size // 2 // ranks), dtype=torch.bfloat16, device=device)
    whole = torch.zeros(len(share) * ranks, dtype=torch.bfloat16, device=device)
    other = torch.zeros_like(whole) if kind in ("all-to-all", "send/recv") else whole

    def shift() -> None:
        after, before = (rank + 1) % ranks, (rank - 1) % ranks
        for work in dist.batch_isend_irecv(
            [dist.P2POp(dist.isend, whole, after), dist.P2POp(dist.irecv, other, before)]
        ):
            work.wait()

    calls: dict[str, Callable[[], object]] = {
        "all-reduce": lambda: dist.all_reduce(whole),
        "reduce-scatter": lambda: dist.reduce_scatter_tensor(share, whole),
        "all-gather": lambda: dist.all_gather_into_tensor(whole, share),
        "all-to-all": lambda: dist.all_to_all_single(other, whole),
        "send/recv": shift,
    }
    return calls[kind]


def seconds(call: Callable[[], object], count: int, device: "torch.device") -> float:
    """Returns the seconds of one of `count` calls in sequence, on the slowest rank."""
    import torch
    import torch.distributed as dist

    def synchronize() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    for _ in range(3):
        call()
    synchronize()
    dist.all_reduce(torch.zeros(1))  # the ranks begin together
    began = time.perf_counter()
    for _ in range(count):
        call()
    synchronize()
    took = torch.tensor((time.perf_counter() - began) / count, dtype=torch.float64)
    dist.all_reduce(took, dist.ReduceOp.MAX)
    return float(took)


def measure(device: "torch.device", largest: int) -> Iterator[str]:
    """Yields the lines of the table. All ranks go through it together."""
    import torch.distributed as dist

    ranks = dist.get_world_size()
    yield f"{ranks} ranks, {device.type}"
    yield "| collective | bytes | µs | bus GB/s |\n|---|---|---|---|"
    for kind in KINDS:
        times = []
        for size in sizes(largest):
            count = min(MOST_CALLS, max(LEAST_CALLS, SENT // size))
            times.append(seconds(call_of(kind, size, device), count, device))
            rate = bus_bytes(kind, size, ranks) / times[-1] / 1e9
            yield f"| {kind} | {size:,} | {times[-1] * 1e6:,.1f} | {rate:.3g} |"
        yield f"# {kind}: latency {times[0] * 1e6:.1f} µs, bus bandwidth of the largest size {rate:.3g} GB/s"


def main(argv: list[str]) -> None:
    options, _ = COMMAND.parse(argv)
    several = workers.Workers.of(options)
    if several is not None:
        boot.leave(several.run("launch/benchmark_links.py", [f"largest={options['largest']}"], saves=False))
    boot.join_ranks()
    boot.log()
    warnings.filterwarnings("ignore", module="torch.distributed")  # names of collectives that later versions change
    from ssscale.errors import UserError
    from ssscale.parallel.groups import initialize, shutdown_together

    if boot.world_size() < 2:
        raise UserError("one process has no links: give gpus=N or processes=N, or start it with torchrun or srun")
    groups = initialize(local_rank=int(os.environ.get("LOCAL_RANK", "0")), distributed="RANK" in os.environ)
    for line in measure(groups.device, options["largest"] * 2**20):
        if groups.is_main:
            print(line, flush=True)
    shutdown_together()


if __name__ == "__main__":
    boot.run(COMMAND, main)
