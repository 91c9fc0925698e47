"""The part that all training commands share."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from ssscale.errors import UserError
from ssscale.train.files import refusal

if TYPE_CHECKING:
    from ssscale.config.schema import Config
    from ssscale.parallel.groups import Groups
    from ssscale.train.run import Run


def check_writable(folder: str) -> None:
    """Raises UserError if this process may not write to the run folder, or may not make it. Nothing is written."""
    path = Path(folder).absolute()
    while not os.path.exists(path) and path != path.parent:  # also False where a folder above may not be read
        path = path.parent
    reason = refusal(path) if path.is_dir() else None
    if reason is not None:
        raise UserError(f"run_dir={folder} cannot be written: {reason} ({path})")


def train_on_ranks(config: "Config", make: "Callable[[Groups], Run]") -> None:
    """Joins the other ranks, checks the devices, trains the run that `make` returns, and leaves together.

    Raises UserError and Stop.
    """
    from ssscale.config.choices import Fp8
    from ssscale.errors import TOGETHER, Stop
    from ssscale.parallel.fp8 import refuse_without_fp8
    from ssscale.parallel.groups import initialize, shutdown, shutdown_together
    from ssscale.train.build import memory_of
    from ssscale.train.determinism import make_deterministic
    from ssscale.train.estimate import check_memory
    from ssscale.train.loop import train
    from ssscale.train.preflight import preflight

    if config.train.deterministic:
        make_deterministic()
    parallel, local_rank = config.parallel, int(os.environ.get("LOCAL_RANK", "0"))
    groups = initialize(
        parallel.tensor,
        local_rank,
        # Longer than the watchdog, which names the hanging rank. NCCL's own timeout only aborts the process.
        timeout_minutes=max(10.0, config.train.watchdog / 60 + 5),
        distributed="RANK" in os.environ,
        ulysses=parallel.ulysses,
        ring=parallel.ring,
        shard_within=parallel.shard_within,
    )
    if config.train.fp8 is not Fp8.none:
        refuse_without_fp8(config.train.fp8.value, groups.device)
    per_node = groups.shards.size * groups.tensor_size
    check_memory(config, groups.world_size, memory_of(groups.device), per_node)
    preflight(config.train.preflight, groups)
    try:
        train(make(groups))
    except Stop as stop:
        if stop.code in TOGETHER:
            shutdown_together()
        raise
    shutdown()  # not after an error: other ranks may be inside a collective, and the launcher ends them
