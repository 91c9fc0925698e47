"""`train.microbatch=auto` chooses the most rows per forward pass that fit on a GPU, by the estimate of its memory.

Samples, their order and the sum over a step do not depend on the microbatch. So it is chosen at every start, and a run can
continue on another number of ranks or on other GPUs. Importing this file imports no torch.
"""

import logging
from dataclasses import replace
from typing import TYPE_CHECKING

from ssscale.config.choices import Auto
from ssscale.config.schema import Config
from ssscale.errors import UserError
from ssscale.train.estimate import memory_per_gpu
from ssscale.train.stages import Part, Plan

if TYPE_CHECKING:
    from ssscale.parallel.groups import Groups

logger = logging.getLogger("ssscale")

GIB = 2**30
H100_MEMORY = 79 * GIB  # bytes that CUDA reports for an 80 GB H100
RESERVED = 3 * GIB  # for CUDA's context, NCCL and fragmentation, which the estimate leaves out
MOST_TOKENS = 65_536  # per rank and forward pass, the largest value that was measured; more is no faster
MARGIN = 1.05  # the largest measured peak is 1.045 of its estimate (docs/results/several_gpus.md)


def with_microbatch(
    config: Config, batch_size: int, world_size: int, memory: float = H100_MEMORY, per_node: int | None = None
) -> Config:
    """Returns the configuration of a stage with `auto` replaced by a number of rows.

    batch_size: rows per step over all ranks. memory: bytes of one GPU. `config` has passed `check_world`.
    per_node: as for `memory_per_gpu`.
    The result is the largest divisor of the rows per data-parallel rank that gives at most MOST_TOKENS tokens and whose
    estimate fits into `memory`. If none fits, it is the smallest divisor. Raises UserError if sequence parallelism cannot
    divide the tokens of any divisor.
    """
    if not isinstance(config.train.microbatch, Auto):
        return config
    parallel = config.parallel
    rows = batch_size // (world_size // (parallel.tensor * parallel.context))
    found = [_with(config, number) for number in range(rows, 0, -1) if rows % number == 0]
    found = [changed for changed in found if divides_tokens(changed)]
    if not found:
        raise UserError(
            f"train.microbatch=auto finds no divisor of {rows} rows per rank whose tokens parallel.tensor={parallel.tensor} "
            "divides: set parallel.sequence=false, or use fewer processes"
        )
    small = (changed for changed in found if _tokens(changed) <= MOST_TOKENS)
    return next((changed for changed in small if fits(changed, world_size, memory, per_node)), found[-1])


def fits(config: Config, world_size: int, memory: float = H100_MEMORY, per_node: int | None = None) -> bool:
    """Whether the estimated memory fits on a GPU of `memory` bytes. The microbatch must be a number."""
    return MARGIN * memory_per_gpu(config, world_size, per_node).total + RESERVED <= memory


def divides_tokens(config: Config) -> bool:
    """Whether sequence parallelism, if it is on, can divide the tokens of a microbatch."""
    parallel = config.parallel
    return parallel.tensor == 1 or not parallel.sequence or _tokens(config) % parallel.tensor == 0


def _tokens(config: Config) -> int:
    """Returns the tokens of a microbatch on one rank."""
    return config.train.microbatch_rows * config.data.length // config.parallel.context


def _with(config: Config, rows: int) -> Config:
    return replace(config, train=replace(config.train, microbatch=rows))


class StageConfigs:
    """The configurations of a run's stages, with `auto` replaced by a number for its GPUs. Logs each choice once."""

    def __init__(self, plan: Plan, groups: "Groups") -> None:
        self.plan, self.world_size = plan, groups.world_size
        self.per_node = groups.shards.size * groups.tensor_size
        self.memory = _smallest_gpu(groups)
        self.whose = "" if groups.device.type == "cuda" else ", those of an H100, as there is no GPU"
        self._logged: set[tuple[int, int]] = set()

    def of(self, part: Part) -> Config:
        own = self.plan.configs[part.stage]
        config = with_microbatch(own, part.batch_size, self.world_size, self.memory, self.per_node)
        if config is not own and (part.stage, part.batch_size) not in self._logged:
            self._logged.add((part.stage, part.batch_size))
            self._log(config, part)
        return config

    def _log(self, config: Config, part: Part) -> None:
        parallel = config.parallel
        rows = part.batch_size // (self.world_size // (parallel.tensor * parallel.context))
        total = memory_per_gpu(config, self.world_size, self.per_node).total
        logger.info(
            "train.microbatch=auto: %d of the %d rows per rank and step; estimated memory %.1f of %.1f GiB%s",
            config.train.microbatch_rows,
            rows,
            total / GIB,
            self.memory / GIB,
            self.whose,
        )
        if not fits(config, self.world_size, self.memory, self.per_node):
            logger.warning(
                "the estimated memory does not fit: train.recompute=selective or full, parallel.zero_stage=2 or 3, or "
                "parallel.tensor need less"
            )


def _smallest_gpu(groups: "Groups") -> float:
    """Returns the bytes of the smallest GPU of all ranks. On CPUs, those of an 80 GB H100."""
    import torch
    import torch.distributed as dist

    if groups.device.type != "cuda":
        return H100_MEMORY
    memory = torch.tensor(torch.cuda.get_device_properties(groups.device).total_memory, dtype=torch.float64)
    dist.all_reduce(memory, op=dist.ReduceOp.MIN)
    return float(memory)
