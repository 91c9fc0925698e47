"""Faults of a run: the record in events.jsonl, and the message after running out of GPU memory."""

import json
import re
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from ssscale.errors import OUT_OF_MEMORY, Stop
from ssscale.train.appender import Appender

if TYPE_CHECKING:
    from ssscale.train.peers import Where

GIB = 2**30
NCCL_MEMORY = re.compile(
    "out of memory|Failed to CUDA [cm]alloc"
)  # what NCCL writes where torch raises OutOfMemoryError


class Rollback(Exception):  # noqa: N818 - an order, not a mistake
    """Raised if gradients stay NaN or Inf, to go back to the last checkpoint."""


def open_events(folder: Path) -> Appender:
    """Opens the run's events.jsonl. Unlike metrics.jsonl, it keeps all its lines when the run resumes."""
    return Appender(folder / "events.jsonl")


def write_event(events: Appender, event: dict[str, Any]) -> None:
    events.write(json.dumps({"time": time.strftime("%Y-%m-%dT%H:%M:%S"), **event}).encode() + b"\n")


def out_of_memory(error: Exception, at: str, where: "Where") -> Stop | None:
    """Returns the Stop for a CUDA out-of-memory error of torch or NCCL, or None for any other error.

    at: the rank, step and phase, for the message.
    """
    of_nccl = isinstance(error, dist.DistError) and NCCL_MEMORY.search(str(error))
    if not isinstance(error, torch.OutOfMemoryError) and not of_nccl:
        return None
    now = torch.cuda.memory_allocated() if torch.cuda.is_available() else 0
    train, parallel, held = where.config.train, where.config.parallel, where.held
    grown = max(now - held, 0)
    if held > grown:
        part, change = "weights, gradients and optimizer", "more ranks, parallel.zero_stage=2 or 3, or parallel.tensor"
        change += f" (now ZeRO {parallel.zero_stage}, tensor {parallel.tensor})"
    else:
        part, change = "activations and logits", f"train.microbatch below {train.microbatch}"
        change += f" or train.recompute=selective or full (now {train.recompute.value})"
    sizes = f"{held / GIB:.1f} GiB stay between steps, {grown / GIB:.1f} GiB more were in use"
    return Stop(f"{at}: out of GPU memory: {sizes}; the larger part is {part}: use {change}", OUT_OF_MEMORY)
