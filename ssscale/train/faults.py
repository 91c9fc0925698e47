"""Loss spikes, running out of memory and lost peers: telling them apart and saying what can be done."""

import json
import logging
import math
import statistics
import time
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ssscale.data.order import Order
from ssscale.errors import OUT_OF_MEMORY, Stop
from ssscale.train.appender import Appender

if TYPE_CHECKING:
    from ssscale.train.peers import Where

logger = logging.getLogger("ssscale")

GIB = 2**30


class Rollback(Exception):  # noqa: N818 - an order, not a mistake
    """Losses stay NaN or Inf: go back to the last checkpoint."""


class SpikeDetector:
    """z = (loss − median) / (1.4826 · MAD) of the last `window` losses: robust, as spikes in the window do not widen it.

    (Iglewicz & Hoaglin 1993.) The deviation counts as at least 0.1 % of the median, as equal losses would have none.
    """

    def __init__(self, threshold: float, window: int = 100, least: int = 20) -> None:
        self.threshold, self.least = threshold, least
        self.losses: deque[float] = deque(maxlen=window)

    def score(self, loss: float) -> float | None:
        """z where it is above the threshold, else None; the loss joins the window."""
        found = None
        if not math.isfinite(loss):
            return None
        if self.threshold and len(self.losses) >= self.least:
            median = statistics.median(self.losses)
            deviation = 1.4826 * statistics.median(abs(value - median) for value in self.losses)
            z = (loss - median) / max(deviation, 1e-3 * abs(median))
            found = z if z > self.threshold else None
        self.losses.append(loss)
        return found

    def look(self, events: Appender, step: int, loss: float, samples: range, order: Order) -> None:
        """Note a loss that stands out, with the rows that made it."""
        z = self.score(loss)
        if z is not None:
            rows: dict[str, list[int]] = {}
            for sample in map(order.__getitem__, samples):
                rows.setdefault(order.names[sample.source], []).append(sample.row)
            logger.warning("step %d: loss %.4g is a spike (z = %.1f); its rows are in events.jsonl", step, loss, z)
            write_event(events, {"event": "loss_spike", "step": step, "loss": loss, "z": z, "rows": rows})


def open_events(folder: Path) -> Appender:
    """The run's events.jsonl, which no resuming cuts back."""
    return Appender(folder / "events.jsonl")


def write_event(events: Appender, event: dict[str, Any]) -> None:
    events.write(json.dumps({"time": time.strftime("%Y-%m-%dT%H:%M:%S"), **event}).encode() + b"\n")


def out_of_memory(error: Exception, at: str, where: "Where") -> Stop | None:
    """The end that running out of GPU memory means, None for any other error. at: the rank and the step."""
    if not isinstance(error, torch.OutOfMemoryError):
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
