"""A thread in every rank that ends a run without progress, and reports which rank holds it up."""

import faulthandler
import json
import logging
import os
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Any

from ssscale.errors import FAILED, STALLED
from ssscale.launcher import note_code
from ssscale.train import repeats

logger = logging.getLogger("ssscale")

GATHER_S = 5.0  # seconds to wait for the files of other ranks


class Watchdog:
    """Ends the process if more than `timeout` seconds pass between two calls of `mark`; 0 disables it.

    Each rank then writes its step, its phase and the stacks of all threads to stacks/rank-00000.txt in the run folder. The
    lowest rank that could write says which ranks are behind or silent. All ranks exit with code STALLED, or with FAILED if
    the run has hung at this step repeats.SAME_LOSS times.
    """

    def __init__(self, folder: Path, rank: int, world_size: int, timeout: float) -> None:
        self.folder, self.rank, self.world_size, self.timeout = folder / "stacks", rank, world_size, timeout
        self.step, self.phase, self.marked = 0, "start", time.monotonic()
        self.marks = 0  # since the step began
        self._ended = threading.Event()
        self.file = self.folder / f"rank-{rank:05d}.txt"

    def start(self) -> None:
        self.file.unlink(missing_ok=True)
        self.marked = time.monotonic()
        if self.timeout:
            threading.Thread(target=self._watch, name="watchdog", daemon=True).start()

    def mark(self, phase: str) -> None:
        self.phase, self.marked = phase, time.monotonic()
        self.marks += 1

    def begin(self, step: int) -> None:
        self.step, self.marks = step, 0

    def close(self) -> None:
        self._ended.set()

    def _watch(self) -> None:
        while not self._ended.wait(min(1.0, self.timeout / 4)):
            if time.monotonic() - self.marked > self.timeout:
                self._end()

    def _end(self) -> None:
        code = STALLED
        try:
            times = repeats.times(self.folder, self.rank, [self.step, "stalled"])
            code = FAILED if times >= repeats.SAME_LOSS else STALLED
            self._report(times)
        except OSError as error:  # for example, the disk is full
            text = f"no progress for {self.timeout:g} s at step {self.step}: rank {self.rank} is in {self.phase}"
            print(f"stopped: {text}; the stacks cannot be written: {error}", file=sys.stderr, flush=True)
        finally:
            note_code(code)
            os._exit(code)

    def _report(self, times: int) -> None:
        """times: how often the run has hung at this step."""
        place = {"rank": self.rank, "host": socket.gethostname(), "pid": os.getpid(), "step": self.step}
        place |= {"phase": self.phase, "marks": self.marks, "seconds": round(time.monotonic() - self.marked, 1)}
        self.folder.mkdir(parents=True, exist_ok=True)
        temporary = self.file.with_suffix(".tmp")
        with open(temporary, "w") as file:
            file.write(json.dumps(place) + "\n")
            file.flush()
            faulthandler.dump_traceback(file, all_threads=True)
        os.replace(temporary, self.file)
        time.sleep(GATHER_S)
        found = self._read()
        if self.rank == min(found, default=self.rank):
            text = f"{self.verdict(found)}; stacks are in {self.folder}"
            if times >= repeats.SAME_LOSS:
                text += f"; {repeats.advice(times, self.folder)}"
            print(f"stopped: {text}", file=sys.stderr, flush=True)
        time.sleep(1.0)  # so that the message comes before those of the launcher

    def _read(self) -> dict[int, dict[str, Any]]:
        found = {}
        for rank in range(self.world_size):
            path = self.folder / f"rank-{rank:05d}.txt"
            if path.is_file():
                found[rank] = json.loads(path.read_text().splitlines()[0])
        return found

    def verdict(self, found: dict[int, dict[str, Any]]) -> str:
        """Returns one sentence that says which ranks are silent and which are behind. found: the ranks' places by rank."""
        silent = [rank for rank in range(self.world_size) if rank not in found]
        text = f"no progress for {self.timeout:g} s at step {self.step}"
        if silent:
            text += f": no answer from rank {', '.join(map(str, silent))}"
        places = {rank: (place["step"], place["marks"]) for rank, place in found.items()}
        behind = [rank for rank, place in places.items() if place == min(places.values())]
        if len(behind) < len(found):
            names = ", ".join(f"{rank} ({found[rank]['phase']} on {found[rank]['host']})" for rank in behind)
            text += f": rank {names} is behind the others"
        elif not silent:
            text += f": all ranks are in {self.phase}"
        return text
