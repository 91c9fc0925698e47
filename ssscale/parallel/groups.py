"""Process groups. Megatron-core keeps them in globals; only this module creates them and returns a frozen `Groups`."""

import atexit
import datetime
import functools
import math
import os
import resource
from contextlib import suppress
from dataclasses import dataclass

import torch
import torch.distributed as dist

from ssscale.config.choices import ShardWithin
from ssscale.errors import STALLED, Stop, UserError
from ssscale.parallel.exchange import gather_json
from ssscale.parallel.shards import Shards, make_shards

OPEN_FILES = 2**20  # the most that a process asks for; a hard limit may be far above


@dataclass(frozen=True)
class Groups:
    """The ranks and process groups of this process.

    tensor: ranks that hold shares of the same matrices.
    ulysses, ring: ranks that share the tokens of the same rows. A context group has ulysses · ring ranks, which together
        read one microbatch.
    data: ranks that read different rows.
    replica: the data · context ranks that hold the same weights. Gradients are summed and ZeRO divides over this group.
    shards: those of them among which ZeRO stage 1 divides the optimizer's state. All, unless `parallel.shard_within` says
        otherwise.
    in_graph: whether exchanges inside of blocks are operators that a compiled graph contains
        (ssscale/parallel/operators.py). If not, the graph ends before each exchange and a new one begins after it.
    """

    rank: int
    world_size: int
    tensor_rank: int
    tensor_size: int
    data_rank: int
    data_size: int
    ulysses_rank: int
    ulysses_size: int
    ring_rank: int
    ring_size: int
    replica_rank: int
    replica_size: int
    tensor_group: dist.ProcessGroup
    ulysses_group: dist.ProcessGroup | None  # None: the group is this rank alone
    ring_group: dist.ProcessGroup | None
    replica_group: dist.ProcessGroup
    shards: Shards
    device: torch.device
    in_graph: bool = False

    @property
    def context_size(self) -> int:
        return self.ulysses_size * self.ring_size

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"


def initialize(
    tensor: int = 1,
    local_rank: int = 0,
    timeout_minutes: float = 10.0,
    distributed: bool = False,
    ulysses: int = 1,
    ring: int = 1,
    shard_within: int | ShardWithin = ShardWithin.all,
) -> Groups:
    """Starts torch.distributed (NCCL on GPUs, gloo on CPUs) and creates Megatron-core's process groups.

    local_rank: index of this process's GPU on its host.
    timeout_minutes: how long a collective of these groups waits before it fails.
    distributed: whether torchrun or Slurm started the process, whose environment then names its peers. Otherwise the
        process is the only rank.
    shard_within: the key of `parallel`.
    Raises UserError if the number of processes is not a multiple of tensor · ulysses · ring, if MASTER_PORT is in use or if
    the ranks of a node cannot divide the optimizer's state, and Stop if rank 0 cannot be reached.
    """
    from ssscale.parallel.megatron_patches import parallel_state

    cuda = torch.cuda.is_available()
    device = torch.device("cuda", local_rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    timeout = datetime.timedelta(minutes=timeout_minutes)
    if not dist.is_initialized():
        _start("cpu:gloo,cuda:nccl" if cuda else "gloo", distributed, timeout)
    _start_megatron(tensor, ulysses, ring, timeout_minutes)
    context_rank = parallel_state.get_context_parallel_rank()
    ulysses_group, ring_group = _context_groups(ulysses, ring, timeout)
    replica_group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    return Groups(
        rank=dist.get_rank(),
        world_size=dist.get_world_size(),
        tensor_rank=parallel_state.get_tensor_model_parallel_rank(),
        tensor_size=tensor,
        data_rank=parallel_state.get_data_parallel_rank(),
        data_size=parallel_state.get_data_parallel_world_size(),
        ulysses_rank=context_rank % ulysses,
        ulysses_size=ulysses,
        ring_rank=context_rank // ulysses,
        ring_size=ring,
        replica_rank=parallel_state.get_data_parallel_rank(with_context_parallel=True),
        replica_size=parallel_state.get_data_parallel_world_size(with_context_parallel=True),
        tensor_group=parallel_state.get_tensor_model_parallel_group(),
        ulysses_group=ulysses_group,
        ring_group=ring_group,
        replica_group=replica_group,
        shards=make_shards(shard_within, replica_group, tensor, timeout),
        device=device,
    )


def allow_open_files() -> None:
    """Raises the limit on open files as far as this process may: each rank has connections to many others."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, OPEN_FILES)
    if soft not in (resource.RLIM_INFINITY, most):
        with suppress(OSError, ValueError):  # a container may forbid it; the old limit may be enough
            resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, most), hard))


def _start(backend: str, distributed: bool, timeout: datetime.timedelta) -> None:
    allow_open_files()
    if distributed:
        try:
            dist.init_process_group(backend, timeout=timeout)
        except (dist.DistNetworkError, dist.DistStoreError) as error:
            raise _unreachable(error, timeout) from error
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
        atexit.register(shutdown)  # NCCL warns about groups that still exist at exit


def _start_megatron(tensor: int, ulysses: int, ring: int, timeout_minutes: float) -> None:
    from ssscale.parallel.megatron_patches import parallel_state

    world_size = dist.get_world_size()
    if world_size % (tensor * ulysses * ring):
        raise UserError(
            f"parallel.tensor={tensor} × ulysses={ulysses} × ring={ring} does not divide the {world_size} processes that "
            "were started"
        )
    if not parallel_state.is_initialized():
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=tensor,
            context_parallel_size=ulysses * ring,
            distributed_timeout_minutes=math.ceil(timeout_minutes),
        )


def _unreachable(error: Exception, timeout: datetime.timedelta) -> Exception:
    """Returns the sentence for a rendezvous that failed."""
    address, port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
    if "EADDRINUSE" in str(error):
        return UserError(f"MASTER_PORT={port} is in use on {address}: set it to the number of a free port")
    rank, world = os.environ.get("RANK", ""), os.environ.get("WORLD_SIZE", "")
    late = f"rank {rank} did not reach" if rank != "0" else f"not all {world} processes reached"
    minutes = timeout.total_seconds() / 60
    return Stop(
        f"{late} rank 0 at {address}:{port} within {minutes:.3g} minutes: are all processes running, and does a firewall "
        "block the port?",
        STALLED,
    )


def _context_groups(
    ulysses: int, ring: int, timeout: datetime.timedelta
) -> tuple[dist.ProcessGroup | None, dist.ProcessGroup | None]:
    """Returns this rank's Ulysses group (adjacent ranks of the context group) and its ring (every ulysses-th of them)."""
    from ssscale.parallel.megatron_patches import parallel_state

    context = parallel_state.get_context_parallel_group()
    if ulysses == 1 or ring == 1:
        return (context if ulysses > 1 else None), (context if ring > 1 else None)
    whole = sorted({tuple(ranks) for ranks in gather_json(dist.get_process_group_ranks(context))})
    neighbours = [list(ranks[i : i + ulysses]) for ranks in whole for i in range(0, len(ranks), ulysses)]
    apart = [list(ranks[i::ulysses]) for ranks in whole for i in range(ulysses)]
    found, _ = dist.new_subgroups_by_enumeration(neighbours, timeout)
    return found, dist.new_subgroups_by_enumeration(apart, timeout)[0]


def shutdown_together() -> None:
    """Shuts down after all ranks have come this far.

    To ranks that wait for it in a collective, a rank that leaves earlier would look lost.
    """
    if dist.is_initialized():
        with suppress(RuntimeError):  # losing another rank here does not change how this one ends
            dist.all_reduce(torch.zeros(1))
    shutdown()


def shutdown() -> None:
    """Destroys Megatron-core's groups and shuts down torch.distributed."""
    from ssscale.parallel.megatron_patches import parallel_state

    parallel_state.destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()


class MegatronMPU:
    """Gives Megatron-core's parallel_state the function names that DeepSpeed expects of its `mpu` argument.

    For DeepSpeed, all ranks that hold the same weights are data-parallel ranks, including those of a context group.
    """

    def __init__(self) -> None:
        from ssscale.parallel.megatron_patches import parallel_state

        self._state = parallel_state

    def __getattr__(self, name: str) -> object:
        renamed = name.replace("get_model_parallel_", "get_tensor_model_parallel_")
        found = getattr(self._state, renamed)
        if name in ("get_data_parallel_group", "get_data_parallel_rank", "get_data_parallel_world_size"):
            return functools.partial(found, with_context_parallel=True)
        return found
