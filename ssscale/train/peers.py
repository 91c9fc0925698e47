"""Tells the other ranks why a rank failed, and decides which errors mean that another rank is gone.

A rank whose peer has left only sees a closed connection. So every rank that fails writes the reason to a file in the run
folder, and a rank that has lost a connection reads these files first. If another rank reported an error, that error is the
cause, and all ranks end with its exit code. A rank that left without a report (a crashed node, kill -9) is *gone*, and the
same command is started again, as after an error of a GPU. If the same thing happens repeatedly at the same step, the job
ends.
"""

import faulthandler
import re
import socket
import time
import traceback
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, NamedTuple

import torch.distributed as dist

from ssscale.config.schema import Config
from ssscale.errors import FAILED, STALLED, TOGETHER, Stop, UserError
from ssscale.parallel.exchange import gather_json
from ssscale.parallel.groups import Groups
from ssscale.train import repeats
from ssscale.train.faults import Rollback, mishap, out_of_memory
from ssscale.train.hooks.guard import listed
from ssscale.train.repeats import SAME_ERROR, SAME_LOSS, read_json

GATHER_S = 3.0  # seconds to wait for the reports of other ranks
GLOO = re.compile(r"gloo/transport/\w+/\w+\.cc:\d+\]")  # in gloo's errors, which have no type of their own


class Where(NamedTuple):
    """What a rank was doing when it failed. held: bytes of GPU memory that stay allocated between steps."""

    config: Config
    step: int
    phase: str
    held: int


def is_lost_connection(error: BaseException) -> bool:
    """Whether an error comes from a connection between ranks.

    It is recognized by its type, or, for gloo's RuntimeErrors, by the source file in the message.
    """
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and bool(GLOO.search(str(error))))


class Peers:
    """The ranks of a run and their reports of failures. All ranks construct it together."""

    def __init__(self, folder: Path, groups: Groups) -> None:
        self.folder, self.groups = folder / "stacks", groups
        found = gather_json([uuid.uuid4().hex, socket.gethostname()])
        self.start = found[0][0]  # of the main rank; tells reports of this start from those of earlier ones
        self.hosts = [host for _, host in found]
        self.crashes: IO[str] | None = None
        self.is_open = False

    def open(self) -> None:
        """Allows reports to be written, now that the folder is the run's, and records crashes of the interpreter there."""
        self.is_open = True
        with suppress(OSError):
            self.folder.mkdir(exist_ok=True)
            if not faulthandler.is_enabled():
                self.crashes = open(self._crash(self.groups.rank), "w")  # noqa: SIM115 - stays open until `close`
                self.crashes.write(f"{self.start}\n")
                self.crashes.flush()
                faulthandler.enable(self.crashes)

    def close(self) -> None:
        if self.crashes is not None:
            faulthandler.disable()
            self.crashes.close()
            self.crashes = None
            with suppress(OSError):
                self._crash(self.groups.rank).unlink()
                self.folder.rmdir()  # fails if the folder is not empty

    @contextmanager
    def telling(self, where: Callable[[], Where]) -> Iterator[None]:
        """Reports an error of the body to the other ranks. Raises Stop for errors that the user did not cause.

        where: called at an error, to say what this rank was doing.
        """
        if self.is_open:
            self.open()  # opens the file of crashes again, which the first `telling` has closed
        try:
            yield
        except Rollback:
            raise
        except Exception as error:
            ended = self._ended(error, where())
            if ended is error:
                raise
            raise ended from error
        finally:
            self.close()

    def _ended(self, error: Exception, where: Where) -> Exception:
        """Reports an error and returns the exception with which this rank ends.

        Unexpected errors are returned unchanged as long as the folder is not the run's own.
        """
        at = f"rank {self.groups.rank}, step {where.step}, {where.phase}"
        memory = out_of_memory(error, at, where)
        if memory is not None:
            self._report(str(memory), memory.code)
            return memory
        cause = mishap(error)
        if cause is not None and self.is_open:
            return self._mishap(error, cause, where)
        if isinstance(error, Stop | UserError):
            code = error.code if isinstance(error, Stop) else 2
            if code not in TOGETHER:
                self._report(str(error), code)
            return error
        first = (str(error).splitlines() or [""])[0][:200]
        if is_lost_connection(error) and self.groups.world_size > 1:
            self._report(first, STALLED, lost=True)
            self._write_traceback(error)
            return self._lost(error, at, first, where)
        if not self.is_open:
            return error
        text = f"{at}: {type(error).__name__}: {first}"
        self._report(text, FAILED)
        file = self._write_traceback(error)
        return error if file is None else Stop(f"{text}; an unexpected error: the whole traceback is in {file}", FAILED)

    def _mishap(self, error: Exception, cause: str, where: Where) -> Stop:
        text = f"rank {self._named([self.groups.rank])}, step {where.step}, {where.phase}: {cause}"
        file = self._write_traceback(error)
        text += f"; the whole traceback is in {file}" if file else ""
        stop = self._repeated([where.step, "mishap"], SAME_LOSS, text)
        stop = stop or Stop(f"{text}; the same command continues", STALLED)
        self._report(str(stop), stop.code)
        return stop

    def _lost(self, error: Exception, at: str, first: str, where: Where) -> Stop:
        found = self._gather()
        for rank, report in sorted(found.items()):
            if not report["lost"]:
                return Stop(f"{at}: rank {rank} has ended: {report['sentence']}", report["code"])
        silent = [rank for rank in range(self.groups.world_size) if rank not in found]
        for rank in silent:
            if self._crashed(rank):
                return Stop(f"{at}: rank {rank} has crashed: its stacks are in {self._crash(rank)}", FAILED)
        # If a rank left without a report, phase and message depend on when the others notice, so they are not compared.
        same = [where.step, silent] if silent else [where.step, where.phase, re.sub(r"\d+", "", first)]
        stop = self._repeated(same, SAME_LOSS if silent else SAME_ERROR, f"{at}: {first}")
        silence = f", without a report of rank {self._named(silent)}" if silent else ""
        return stop or Stop(f"{at}: another rank is gone{silence} ({first}); the same command continues", STALLED)

    def _named(self, ranks: list[int]) -> str:
        return listed([f"{rank} on {self.hosts[rank]}" for rank in ranks])

    def _repeated(self, same: list[Any], limit: int, text: str) -> Stop | None:
        """Counts an end of the run. Returns the Stop that starts no other one if `limit` is reached."""
        times = repeats.times(self.folder, self.groups.rank, same) if self.is_open else 1
        return Stop(f"{text}; {repeats.advice(times, self.folder)}", FAILED) if times >= limit else None

    def _report(self, sentence: str, code: int, lost: bool = False) -> None:
        report = {"start": self.start, "sentence": sentence, "code": code, "lost": lost}
        if self.is_open:
            repeats.write_json(self._failure(self.groups.rank), report)

    def _gather(self) -> dict[int, dict[str, Any]]:
        """Returns the reports by rank, including this rank's own, that arrive within GATHER_S seconds.

        Stops waiting as soon as one report is not about a lost connection.
        """
        end = time.monotonic() + GATHER_S
        while True:
            found = {}
            for rank in range(self.groups.world_size):
                report = read_json(self._failure(rank))
                if isinstance(report, dict) and report.get("start") == self.start:
                    found[rank] = report
            decided = any(not report["lost"] for report in found.values())
            if decided or len(found) == self.groups.world_size or time.monotonic() > end:
                return found
            time.sleep(0.1)

    def _write_traceback(self, error: Exception) -> Path | None:
        file = self.folder / f"error-rank-{self.groups.rank:05d}.txt"
        if self.is_open:
            with suppress(OSError):
                self.folder.mkdir(exist_ok=True)
                file.write_text("".join(traceback.format_exception(error)))
                return file
        return None

    def _failure(self, rank: int) -> Path:
        return self.folder / f"failed-rank-{rank:05d}.json"

    def _crash(self, rank: int) -> Path:
        return self.folder / f"crash-rank-{rank:05d}.txt"

    def _crashed(self, rank: int) -> bool:
        with suppress(OSError):
            first, *stacks = self._crash(rank).read_text(errors="replace").splitlines()
            return first == self.start and bool(stacks)
        return False
