"""Process groups. Megatron-core keeps them in globals; this module alone makes them and hands out a frozen `Groups`."""

import datetime
from dataclasses import dataclass

import torch
import torch.distributed as dist

from ssscale.errors import UserError


@dataclass(frozen=True)
class Groups:
    """This process's place in the job: its rank among all, among its tensor-parallel and among its data-parallel peers."""

    rank: int
    world_size: int
    tensor_rank: int
    tensor_size: int
    data_rank: int
    data_size: int
    tensor_group: dist.ProcessGroup
    data_group: dist.ProcessGroup
    device: torch.device

    @property
    def is_main(self) -> bool:
        return self.rank == 0


def initialize(
    tensor: int = 1, local_rank: int = 0, timeout_minutes: float = 10.0, distributed: bool = False
) -> Groups:
    """Start torch.distributed (NCCL on GPUs, gloo on CPUs) and Megatron-core's groups.

    distributed: the process was started by torchrun or Slurm, whose environment names its peers; otherwise it is alone.
    Raises UserError where the number of processes is no multiple of `tensor`.
    """
    from megatron.core import parallel_state

    cuda = torch.cuda.is_available()
    device = torch.device("cuda", local_rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    if not dist.is_initialized():
        backend = "cpu:gloo,cuda:nccl" if cuda else "gloo"
        timeout = datetime.timedelta(minutes=timeout_minutes)
        if distributed:
            dist.init_process_group(backend, timeout=timeout)
        else:
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
    world_size = dist.get_world_size()
    if world_size % tensor:
        raise UserError(f"parallel.tensor={tensor} does not divide the {world_size} processes that were started")
    if not parallel_state.is_initialized():
        parallel_state.initialize_model_parallel(tensor_model_parallel_size=tensor)
    return Groups(
        rank=dist.get_rank(),
        world_size=world_size,
        tensor_rank=parallel_state.get_tensor_model_parallel_rank(),
        tensor_size=tensor,
        data_rank=parallel_state.get_data_parallel_rank(),
        data_size=parallel_state.get_data_parallel_world_size(),
        tensor_group=parallel_state.get_tensor_model_parallel_group(),
        data_group=parallel_state.get_data_parallel_group(),
        device=device,
    )


def shutdown() -> None:
    """Take Megatron-core's groups and torch.distributed down again."""
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()


class MegatronMPU:
    """Megatron-core's parallel_state under the names that DeepSpeed's `mpu` argument calls."""

    def __init__(self) -> None:
        from megatron.core import parallel_state

        self._state = parallel_state

    def __getattr__(self, name: str) -> object:
        renamed = name.replace("get_model_parallel_", "get_tensor_model_parallel_")
        return getattr(self._state, renamed)
