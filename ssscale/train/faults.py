"""Faults of a run: the records in events.jsonl, and the messages about errors of GPUs and killed workers."""

import json
import os
import re
import socket
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from ssscale.data.stream import killed_worker
from ssscale.errors import OUT_OF_MEMORY, Stop
from ssscale.train.appender import Appender

if TYPE_CHECKING:
    from ssscale.train.peers import Where

GIB = 2**30
# What NCCL, cuBLAS and others write where torch raises OutOfMemoryError.
MEMORY = re.compile("out of memory|Failed to CUDA [cm]alloc|ALLOC_FAILED")
GPU_ERROR = re.compile(r"CUDA error|Triton Error \[CUDA\]")  # of libraries whose errors have no type of their own
# Of these, what the kernel's log reports as Xid. The others are more often mistakes in kernels or their arguments.
BROKEN = re.compile(
    "ECC|unspecified launch failure|hardware stack|GPU is lost|fallen off|unknown error|NVLink", re.IGNORECASE
)


class Rollback(Exception):  # noqa: N818 - an order, not a mistake
    """Raised if gradients stay NaN or Inf, to go back to the last checkpoint."""


def open_events(folder: Path) -> Appender:
    """Opens the run's events.jsonl. Unlike metrics.jsonl, it keeps all its lines when the run resumes."""
    return Appender(folder / "events.jsonl")


def write_event(events: Appender, event: dict[str, Any]) -> None:
    events.write(json.dumps({"time": time.strftime("%Y-%m-%dT%H:%M:%S"), **event}).encode() + b"\n")


def write_start(events: Appender, step: int, ranks: int, checkpoint: Path | None, slurm_job: str | None) -> None:
    """Writes the event of a start, on the main rank. checkpoint: from which the run continues after `step`."""
    event = {"event": "start", "step": step, "ranks": ranks, "host": socket.gethostname()}
    if checkpoint is not None:
        event["checkpoint"] = checkpoint.name
    if slurm_job is not None:
        event |= {"job": slurm_job, "restarts": os.environ.get("SLURM_RESTART_COUNT", "0")}
    write_event(events, event)


def mishap(error: Exception) -> str | None:
    """Returns the sentence for an error that a new start may not have: of a GPU, or a killed worker of the data loader.

    None for any other error.
    """
    killed = killed_worker(error)
    if killed is not None:
        return killed
    if not is_of_gpu(error):
        return None
    first = (str(error).splitlines() or [""])[0][:200]
    if BROKEN.search(first):
        return (
            f"the GPU failed: {first}: look for Xid in `dmesg` of this host, and exclude the host if the GPU is broken"
        )
    return f"an error of the GPU: {first}"


def is_of_gpu(error: Exception) -> bool:
    """Whether an error was raised by CUDA, but not by an exchange between GPUs."""
    of_a_library = isinstance(error, RuntimeError) and not isinstance(error, dist.DistError)
    return isinstance(error, torch.AcceleratorError) or bool(of_a_library and GPU_ERROR.search(str(error)))


def out_of_memory(error: Exception, at: str, where: "Where") -> Stop | None:
    """Returns the Stop for a CUDA out-of-memory error of torch or a library, or None for any other error.

    at: the rank, step and phase, for the message.
    """
    of_a_library = (isinstance(error, dist.DistError) or is_of_gpu(error)) and MEMORY.search(str(error))
    if not isinstance(error, torch.OutOfMemoryError) and not of_a_library:
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
