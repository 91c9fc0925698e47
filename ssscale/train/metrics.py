"""Writes the metrics of a run to JSON lines, TensorBoard and the terminal, on the main rank."""

import json
import logging
import math
import os
import re
import secrets
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from torch import Tensor

from ssscale.config.schema import Config
from ssscale.errors import UserError
from ssscale.model.flops import PEAK_FLOPS, flops_per_token
from ssscale.parallel.groups import Groups
from ssscale.train.appender import Appender
from ssscale.train.event_file import EventFile
from ssscale.train.files import replacing
from ssscale.train.records import keep_until
from ssscale.train.schedule import stage_at

logger = logging.getLogger("ssscale")

WANDB_ID = "wandb_id.txt"  # in the run folder
NOT_IN_IDS = r"[^\w.-]"  # W&B refuses / \ # ? % : in ids
ID = r"[\w.-]{1,128}"


class Metrics:
    """Writes each record to `metrics.jsonl`, `tensorboard/` and the terminal while it is open. Only the main rank writes."""

    def __init__(self, folder: Path, total_steps: int, is_main: bool, use_wandb: bool = False) -> None:
        self.folder, self.total_steps, self.is_main, self.use_wandb = folder, total_steps, is_main, use_wandb
        self.outputs: _Outputs | None = None

    @contextmanager
    def open(self, first_step: int) -> Iterator[None]:
        """Opens the outputs to continue after `first_step`, and removes records of later steps from the file.

        Raises UserError if the file cannot be cut back.
        """
        if not self.is_main:
            yield
            return
        self.outputs = _Outputs(self.folder, first_step, self.total_steps, self.use_wandb)
        try:
            yield
        finally:
            self.outputs.close()
            self.outputs = None

    def advance(self, step: int) -> None:
        """Moves the progress bar."""
        if self.outputs is not None:
            self.outputs.progress.update(self.outputs.task, completed=step)

    def write(self, record: dict[str, Any]) -> None:
        """Writes a record, which must have a `step`.

        TensorBoard gets its numbers. The file gets all of it, and `time` in seconds since 1970. The terminal gets the
        values that are neither lists nor named `SECTION/NAME`.
        """
        if self.outputs is not None:
            self.outputs.write(record)


class _Outputs:
    def __init__(self, folder: Path, first_step: int, total_steps: int, use_wandb: bool) -> None:
        self.wandb = _Wandb(folder, continues=first_step > 0) if use_wandb else None
        path = folder / "metrics.jsonl"
        try:
            keep_until(path, first_step)
        except OSError as error:
            raise UserError(f"{path} cannot be cut back to step {first_step}: {error.strerror}") from error
        self.file = Appender(path)
        self.tensorboard = EventFile(folder / "tensorboard", first_step + 1)
        self.newest = first_step
        self.console = Console(soft_wrap=True, markup=False, emoji=False)
        columns = (
            TextColumn("training"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
        )
        self.progress = Progress(*columns, console=self.console, disable=not self.console.is_terminal)
        self.task = self.progress.add_task("training", total=total_steps, completed=first_step)
        self.progress.start()

    def close(self) -> None:
        self.progress.stop()
        self.tensorboard.close()
        if self.wandb is not None:
            self.wandb.finish()
        self.file.close()

    def write(self, record: dict[str, Any]) -> None:
        self.file.write(json.dumps(record | {"time": round(time.time(), 3)}).encode() + b"\n")
        self.tensorboard.write(_scalars(record), record["step"])
        self.newest = max(self.newest, record["step"])
        if self.wandb is not None:
            self.wandb.log(record, self.newest)  # wandb rejects the earlier step of a save
        shown = {
            name: value
            for name, value in record.items()
            if "/" not in name and value is not None and not isinstance(value, list)
        }
        if shown.keys() - {"step", "tokens"}:
            line = "  ".join(f"{name} {_short(value)}" for name, value in shown.items())
            with suppress(OSError):  # the output of the job may be on the full disk too
                self.progress.console.print(line, highlight=False)


def _scalars(record: dict[str, Any]) -> dict[str, float]:
    """Returns the numbers of a record by name. A list gives one number per layer, with the mean over heads."""
    found: dict[str, float] = {}
    for name, value in record.items():
        if isinstance(value, int | float) and name != "step":
            found[name] = value
        elif isinstance(value, list):
            for layer, entry in enumerate(value):
                if entry is None:  # the mixer of this layer has no such value
                    continue
                found[f"{name}/layer{layer:02d}"] = statistics.fmean(entry) if isinstance(entry, list) else entry
    return found


class _Wandb:
    """Logs to Weights & Biases. A log that cannot be written never ends training: after an error, nothing more is sent."""

    def __init__(self, folder: Path, continues: bool) -> None:
        """continues: whether the run has trained before. An outage then only costs the log.

        Raises UserError if the package is missing or the id of the run cannot be read, and for a new run also if
        wandb.init fails.
        """
        try:
            import wandb
        except ImportError as error:
            raise UserError("train.wandb=true needs the package wandb: pip install wandb, or leave it out") from error
        project, own = os.environ.get("WANDB_PROJECT") or "ssscale", wandb_id(folder)
        self.run: Any = None
        self.given_up = False
        try:
            self.run = wandb.init(project=project, id=own, name=folder.name, dir=str(folder), resume="allow")
        except Exception as error:  # no API key, no connection: wandb passes on errors of other libraries too
            if not continues:
                raise UserError(f"train.wandb=true: {_first_line(error)}") from error
            self._give_up(error)

    def log(self, record: dict[str, Any], step: int) -> None:
        self._try(lambda run: run.log(record, step=step))

    def finish(self) -> None:
        if self.given_up and self.run is not None:
            with suppress(Exception):  # it has failed before; unfinished, wandb would wait for its server at exit
                self.run.finish(exit_code=1)
        self._try(lambda run: run.finish())

    def _try(self, call: Callable[[Any], object]) -> None:
        if self.given_up:
            return
        try:
            call(self.run)
        except Exception as error:  # wandb passes on errors of other libraries too
            self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        self.given_up = True
        logger.warning(
            "train.wandb: %s; nothing more is sent until the next start, metrics.jsonl has all", _first_line(error)
        )


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def wandb_id(folder: Path) -> str:
    """Returns the run's id for Weights & Biases, the folder's name and eight random digits, the same at each start.

    Raises UserError if the file that keeps it holds no id.
    """
    file = folder / WANDB_ID
    if file.is_file():
        try:
            found = file.read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(
                f"train.wandb=true: {file} cannot be read: {error}; delete it to begin a new run there"
            ) from error
        if not re.fullmatch(ID, found):
            raise UserError(f"train.wandb=true: {file} holds no id of a run; delete it to begin a new run there")
        return found
    found = f"{re.sub(NOT_IN_IDS, '-', folder.name)[:64]}-{secrets.token_hex(4)}"
    with replacing(file) as temporary:
        temporary.write_text(found + "\n", encoding="utf-8")
    return found


def losses_by_position(sums: Tensor, prefix: str) -> dict[str, float]:
    """Returns the mean loss in nats per token by position, named `prefix/from_FIRST` by a bucket's first position.

    sums: `sums_by_position` (ssscale/data/batch.py) over all ranks, [2, num_buckets]. Empty buckets are left out.
    """
    return losses_by_source(sums, [f"from_{2**bits // 2:06d}" for bits in range(sums.shape[1])], prefix)


def mean_loss(sums: Tensor) -> float:
    """Returns the mean loss in nats per token over all sources; NaN if there is no target. sums: `sums_by_source`."""
    total, targets = sums.sum(1).tolist()
    return total / targets if targets else math.nan


def losses_by_source(sums: Tensor, names: Sequence[str], prefix: str) -> dict[str, float]:
    """Returns the mean loss in nats per token by source, named `prefix/SOURCE`.

    sums: `sums_by_source` over all ranks, [2, num_sources]. Sources without targets are left out.
    """
    pairs = zip(names, sums.T.tolist())
    return {f"{prefix}/{name}": loss / targets for name, (loss, targets) in pairs if targets}


def step_record(
    config: Config,
    step: int,
    tokens: int,
    sums: Tensor,
    names: Sequence[str],
    lr: float,
    grad_norm: float | None,
) -> dict[str, Any]:
    """Returns the record of a logged step. sums: `sums_by_source` over all ranks, in nats; names: the sources."""
    stage = config.train.stages[stage_at(config.train.stages, tokens)[0]].name
    return {
        "step": step,
        "tokens": tokens,
        "stage": stage,
        "loss": mean_loss(sums),
        "lr": lr,
        "grad_norm": grad_norm,
        **losses_by_source(sums, names, "loss"),
    }


def speed(rate: float, config: Config, groups: Groups, unseen: int = 0) -> dict[str, float]:
    """Returns the metrics of speed. rate: tokens per second of all ranks. unseen: as in `BlockGraphs`.

    On GPUs they include `mfu` (6N + 12·L·d·S FLOPs per token), `mfu_causal` (6N + 6·L·d·S) and the peak memory in GiB.
    """
    found = {"tokens_per_second": rate}
    if groups.device.type == "cuda":
        peak = PEAK_FLOPS * groups.world_size
        for name, half in (("mfu", False), ("mfu_causal", True)):
            found[name] = rate * flops_per_token(config.model, config.data.length, causal_half=half) / peak
        found["memory_gib"] = (torch.cuda.max_memory_allocated() + unseen) / 2**30
    return found


def _short(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 100 else f"{value:,.0f}"
    return f"{value:,}" if isinstance(value, int) else str(value)
