"""Process groups. Megatron-core keeps them in globals; this module alone makes them and hands out a frozen `Groups`."""

import atexit
import datetime
import functools
import math
from contextlib import suppress
from dataclasses import dataclass

import torch
import torch.distributed as dist

from ssscale.errors import UserError
from ssscale.parallel.exchange import gather_json


@dataclass(frozen=True)
class Groups:
    """This process's place in the job.

    tensor: ranks that hold parts of the same matrices. data: ranks that read different rows. Ranks of a ring and of a
    Ulysses group share the tokens of the same rows; context = ulysses · ring of them together read one microbatch.
    replica: data · context ranks, which hold the same weights; gradients are summed, and ZeRO divides, over these.
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
    ulysses_group: dist.ProcessGroup | None  # None: this rank alone
    ring_group: dist.ProcessGroup | None
    replica_group: dist.ProcessGroup
    device: torch.device

    @property
    def context_size(self) -> int:
        return self.ulysses_size * self.ring_size

    @property
    def is_main(self) -> bool:
        return self.rank == 0


def initialize(
    tensor: int = 1,
    local_rank: int = 0,
    timeout_minutes: float = 10.0,
    distributed: bool = False,
    ulysses: int = 1,
    ring: int = 1,
) -> Groups:
    """Start torch.distributed (NCCL on GPUs, gloo on CPUs) and Megatron-core's groups.

    timeout_minutes: after which a collective of any of these groups gives up. distributed: the process was started by
    torchrun or Slurm, whose environment names its peers; otherwise it is alone.
    Raises UserError where the number of processes is no multiple of tensor · ulysses · ring.
    """
    from megatron.core import parallel_state

    cuda = torch.cuda.is_available()
    device = torch.device("cuda", local_rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    timeout = datetime.timedelta(minutes=timeout_minutes)
    if not dist.is_initialized():
        _start("cpu:gloo,cuda:nccl" if cuda else "gloo", distributed, timeout)
    world_size = dist.get_world_size()
    context = ulysses * ring
    if world_size % (tensor * context):
        raise UserError(
            f"parallel.tensor={tensor} × ulysses={ulysses} × ring={ring} does not divide the {world_size} processes that "
            "were started"
        )
    if not parallel_state.is_initialized():
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=tensor,
            context_parallel_size=context,
            distributed_timeout_minutes=math.ceil(timeout_minutes),
        )
    context_rank = parallel_state.get_context_parallel_rank()
    ulysses_group, ring_group = _context_groups(ulysses, ring, timeout)
    return Groups(
        rank=dist.get_rank(),
        world_size=world_size,
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
        replica_group=parallel_state.get_data_parallel_group(with_context_parallel=True),
        device=device,
    )


def _start(backend: str, distributed: bool, timeout: datetime.timedelta) -> None:
    if distributed:
        dist.init_process_group(backend, timeout=timeout)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
        atexit.register(shutdown)  # NCCL warns of groups that are left to the end


def _context_groups(
    ulysses: int, ring: int, timeout: datetime.timedelta
) -> tuple[dist.ProcessGroup | None, dist.ProcessGroup | None]:
    """This rank's Ulysses group, of neighbours in the context group, and its ring, of every ulysses-th one there."""
    from megatron.core import parallel_state

    context = parallel_state.get_context_parallel_group()
    if ulysses == 1 or ring == 1:
        return (context if ulysses > 1 else None), (context if ring > 1 else None)
    whole = sorted({tuple(ranks) for ranks in gather_json(dist.get_process_group_ranks(context))})
    neighbours = [list(ranks[i : i + ulysses]) for ranks in whole for i in range(0, len(ranks), ulysses)]
    apart = [list(ranks[i::ulysses]) for ranks in whole for i in range(ulysses)]
    found, _ = dist.new_subgroups_by_enumeration(neighbours, timeout)
    return found, dist.new_subgroups_by_enumeration(apart, timeout)[0]


def shutdown_together() -> None:
    """Shut down once every rank is here: one that left earlier would look lost to those inside a collective with it."""
    if dist.is_initialized():
        with suppress(RuntimeError):  # a rank that is lost by now changes nothing about how this one ends
            dist.all_reduce(torch.zeros(1))
    shutdown()


def shutdown() -> None:
    """Take Megatron-core's groups and torch.distributed down again."""
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()


class MegatronMPU:
    """Megatron-core's parallel_state under the names that DeepSpeed's `mpu` argument calls.

    To DeepSpeed all ranks that hold the same weights are data-parallel ones, those of a context group too.
    """

    def __init__(self) -> None:
        from megatron.core import parallel_state

        self._state = parallel_state

    def __getattr__(self, name: str) -> object:
        renamed = name.replace("get_model_parallel_", "get_tensor_model_parallel_")
        found = getattr(self._state, renamed)
        if name in ("get_data_parallel_group", "get_data_parallel_rank", "get_data_parallel_world_size"):
            return functools.partial(found, with_context_parallel=True)
        return found
