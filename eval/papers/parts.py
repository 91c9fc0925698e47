"""Divides an evaluation into parts, which several processes compute and a later call does not compute again.

A part is one JSON file in FILE.parts beside the result FILE.json. Every process of `share_out` computes its share of the
parts on a GPU of its own. The process that began them then reads all parts and writes the result.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

from eval.checkpoint.gpus import visible_gpus
from ssscale.errors import SAVED, UserError
from ssscale.launcher import LAUNCHER, end_with

T = TypeVar("T")


@dataclass(frozen=True)
class Share:
    """Every `count`-th part from `index` on."""

    index: int = 0
    count: int = 1

    @classmethod
    def parse(cls, text: str) -> "Share":
        """Parse I/N. Raises UserError unless 0 ≤ I < N. The process ends with the one that `share_out` runs in."""
        if LAUNCHER in os.environ:
            end_with(int(os.environ[LAUNCHER]), signal.SIGTERM)
        index, _, count = text.partition("/")
        if not (index.isdigit() and count.isdigit() and int(index) < int(count)):
            raise UserError(f"--share={text} must be I/N with I from 0 to N - 1")
        return cls(int(index), int(count))

    def of(self, names: Sequence[T]) -> Sequence[T]:
        return names[self.index :: self.count]


class Parts:
    """The parts of one result that were computed with the same settings."""

    def __init__(self, file: Path, settings: dict[str, Any]) -> None:
        self.folder, self.settings = file.with_suffix(".parts"), json.loads(json.dumps(settings))

    def get(self, name: str) -> Any:
        """Return a part, or None if it is missing, broken or of other settings."""
        try:
            found = json.loads((self.folder / f"{name}.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return None
        return found["value"] if isinstance(found, dict) and found.get("settings") == self.settings else None

    def put(self, name: str, value: Any) -> None:
        """Write a part. Several processes may write the same one."""
        self.folder.mkdir(parents=True, exist_ok=True)
        own = self.folder / f"{name}.{os.getpid()}"
        own.write_text(json.dumps({"settings": self.settings, "value": value}), encoding="utf-8")
        os.replace(own, self.folder / f"{name}.json")

    def clear(self) -> None:
        """Delete all parts, once the result has them."""
        shutil.rmtree(self.folder, ignore_errors=True)


def processes_of(given: int | None, parts: int) -> int:
    """Return the number of processes: as given, or one per GPU, but at most one per part.

    parts: the largest number of parts that can be computed at once.

    Raises UserError for a number below 1, and for one above the numbers of GPUs and CPU cores.
    """
    import torch  # takes seconds, which --help and mistakes do not wait for

    gpus, cores = torch.cuda.device_count(), len(os.sched_getaffinity(0))
    if given is not None and given < 1:
        raise UserError(f"--processes must be at least 1, not {given}")
    if given is not None and given > max(gpus, cores):
        raise UserError(
            f"--processes={given} is too many for this machine, which has {gpus} GPUs and {cores} CPU cores: each process "
            f"loads the model, so give at most {max(gpus, cores)}"
        )
    return min(given or max(1, gpus), parts)


def share_out(module: str, arguments: list[str], count: int) -> None:
    """Run `python -m MODULE ARGUMENTS --share I/COUNT` for every I at once, each on a GPU of its own, and wait.

    SIGTERM and SIGINT end the processes and exit with code 75, because the same command continues. Raises UserError if
    a process fails.
    """
    gpus = visible_gpus()
    running: list[subprocess.Popen[bytes]] = []

    def stop(number: int, frame: FrameType | None) -> None:
        for process in running:
            process.terminate()
        print("stopped: the same command continues", file=sys.stderr)
        sys.exit(SAVED)

    before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        for index in range(count):
            own = {LAUNCHER: str(os.getpid())} | ({"CUDA_VISIBLE_DEVICES": gpus[index % len(gpus)]} if gpus else {})
            command = [sys.executable, "-m", module, *arguments, "--share", f"{index}/{count}"]
            running.append(subprocess.Popen(command, env=os.environ | own))
        while any(process.poll() is None for process in running):
            time.sleep(0.05)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    failed = [process.returncode for process in running if process.returncode]
    if failed:
        raise UserError(f"{len(failed)} of {count} processes failed, with code {failed[0]}: the reason is above")
