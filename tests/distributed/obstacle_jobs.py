"""Jobs for the worker pool: one of the ranks cannot copy into the memory of the others."""

from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.distributed import _symmetric_memory

from ssscale.config.choices import Auto
from ssscale.config.schema import Config, ParallelConfig, TrainConfig
from ssscale.parallel.copies import CannotCopyError, Peers
from ssscale.train import build
from tests.distributed.jobs import regroup


def share(broken: int) -> str:
    """Returns what a rank says when memory cannot be shared on rank `broken`."""
    peers = object.__new__(Peers)  # whose constructor needs a GPU
    peers.group, peers.device = regroup(2).tensor_group, torch.device("cpu")
    peers.rank, peers.ranks = peers.group.rank(), peers.group.size()

    def rendezvous(*_: Any) -> None:
        if peers.rank == broken:
            raise RuntimeError("peer access is not supported\nC++ stack")

    with (
        patch.object(_symmetric_memory, "empty", torch.empty),
        patch.object(_symmetric_memory, "rendezvous", rendezvous),
        pytest.raises(CannotCopyError) as raised,
    ):
        peers.share(8, torch.int32)
    return str(raised.value)


def choose(given: bool | Auto, broken: int | None) -> tuple[bool, bool] | str:
    """Returns whether the model of two tensor-parallel ranks on GPUs would copy tokens, and overlap gathers instead.

    Or the sentence with which it refuses. broken: the rank that cannot copy.
    """
    groups = replace(regroup(2), device=torch.device("cuda"))
    train = TrainConfig(compile_exchanges=Auto.auto)
    config = Config(train=train, parallel=ParallelConfig(tensor=2, copy_engines=given))
    obstacle = "this one is broken" if dist.get_rank() == broken else None
    options: dict[str, bool] = {}
    with (
        patch.object(build, "obstacle", lambda *_: obstacle),
        patch.object(build, "check_weights"),
        patch.object(build, "memory_of"),
        patch.object(build, "Decoder", lambda *_, **given: options.update(given)),
        patch.object(torch, "device", lambda *_: torch.no_grad()),
    ):
        try:
            build.build_model(config, groups, torch.bfloat16)
        except CannotCopyError as error:
            return str(error)
    return options["copy_engines"], options["overlap_gathers"]
