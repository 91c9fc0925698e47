"""Detects loss spikes, and steps whose gradients are NaN or Inf."""

import logging
import math
import statistics
from collections import deque
from typing import TYPE_CHECKING

from ssscale.train.faults import Rollback, write_event
from ssscale.train.hooks.base import Hook

if TYPE_CHECKING:
    from ssscale.train.run import Run
    from ssscale.train.step import Agreed, Done

logger = logging.getLogger("ssscale")


class Spikes(Hook):
    """`train.spike_z`: records a loss spike in events.jsonl, with the rows of the step."""

    def __init__(self, threshold: float) -> None:
        self.detector = SpikeDetector(threshold)

    def agreed(self, run: "Run", agreed: "Agreed") -> None:
        if run.last is None or not run.groups.is_main:
            return
        step, loss = run.state.step, agreed.last_loss / (run.groups.tensor_size * run.last.num_targets)
        z = self.detector.score(loss)
        if z is not None:
            # The loss is that of the last step, which may have had another batch size and data folder.
            last, size = run.state.samples, run.plan.at(step - 1).batch_size
            rows = run.last.source.rows(range(last - size, last))
            logger.warning("step %d: loss %.4g is a spike (z = %.1f); its rows are in events.jsonl", step, loss, z)
            write_event(run.events, {"event": "loss_spike", "step": step, "loss": loss, "z": z, "rows": rows})


class Skips(Hook):
    """`train.max_skipped`: raises Rollback on all ranks after this many steps in a row with NaN or Inf gradients."""

    every = 1

    def __init__(self, most: int) -> None:
        self.most, self.in_a_row = most, 0

    def act(self, run: "Run", done: "Done") -> None:
        if not done.skipped:
            self.in_a_row = 0
            return
        self.in_a_row += 1
        if run.groups.is_main:
            event = {"event": "skipped", "step": run.state.step, "in_a_row": self.in_a_row}
            write_event(run.events, event)
        logger.warning("step %d has NaN or Inf in its gradients and does not change the weights", run.state.step)
        if self.in_a_row >= self.most:
            self.in_a_row = 0
            raise Rollback


class SpikeDetector:
    """z = (loss − median) / (1.4826 · MAD) over the last `window` losses   (Iglewicz & Hoaglin, 1993)

    MAD is the median absolute deviation, which spikes in the window hardly affect. 1.4826 · MAD is taken as at least 0.1 %
    of the median, because it is 0 for equal losses. No loss is a spike before `least` losses are known.
    """

    def __init__(self, threshold: float, window: int = 100, least: int = 20) -> None:
        self.threshold, self.least = threshold, least
        self.losses: deque[float] = deque(maxlen=window)

    def score(self, loss: float) -> float | None:
        """Returns z if it is above the threshold, else None, and adds a finite loss to the window."""
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
