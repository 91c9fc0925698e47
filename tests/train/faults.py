"""A fault planted in one rank's forward pass, and the events that a run writes down."""

import ctypes
import json
import os
import time
from pathlib import Path
from typing import Any

import torch

MICROBATCHES = 2  # of a step of 4 rows on 2 ranks


def plant(fault: str, steps: tuple[int, ...], rank: int = 1) -> None:
    """In one rank, do something else at some steps' forward passes (counted as this process makes them)."""
    from ssscale.model.decoder import Decoder

    if os.environ["RANK"] != str(rank):
        return
    original, calls = Decoder.forward, []

    def forward(self: Any, *arguments: Any, **more: Any) -> Any:
        found = original(self, *arguments, **more)
        calls.append(1)
        if (len(calls) - 1) // MICROBATCHES + 1 in steps:
            if fault == "hang":
                time.sleep(1000)
            if fault == "die":
                os._exit(1)
            if fault == "bit":
                # Once, in the first of the two microbatches; .data, as autograd would notice.
                self.norm.weight.data[:1].view(torch.int32).bitwise_xor_(len(calls) % MICROBATCHES)
            if fault == "memory":
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
            if fault == "gpu":
                text = "CUDA error: uncorrectable ECC error encountered\nCUDA kernel errors might be reported later"
                raise torch.AcceleratorError(text)
            if fault == "bug":
                raise RuntimeError("NCCL and gloo do not like this tensor: Timed out")
            if fault == "backend":
                raise torch.distributed.DistBackendError("NCCL error in: ProcessGroupNCCL.cpp:3690, invalid usage")
            if fault == "crash":
                ctypes.string_at(0)
            losses, terms = found  # of training, not of validation
            return losses * {"nan": torch.nan, "spike": 10.0, "bit": 1.0}[fault], terms
        return found

    Decoder.forward = forward  # type: ignore[method-assign]


def events(run: Path) -> list[dict[str, Any]]:
    """Without those of starts."""
    return [event for event in all_events(run) if event["event"] != "start"]


def all_events(run: Path) -> list[dict[str, Any]]:
    file = run / "events.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.is_file() else []
