"""How a rank that fails tells the others why, and which failures mean that another rank is gone.

A rank whose peer has left finds a closed connection and nothing else. So every rank that fails says so in a file of the
run folder, and a rank that has lost a connection looks there first: an error of another rank is what has happened, and
its exit code is theirs too. Only a rank that has left without a word (a node that crashed, kill -9) is *gone*, for which
the same command is started again. What happens again at the same step is no accident and ends the job.
"""

import faulthandler
import json
import os
import re
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
from ssscale.parallel.groups import Groups
from ssscale.train.faults import Rollback, out_of_memory
from ssscale.train.whole import from_main

GATHER_S = 3.0  # in which the others say why they have failed
GLOO = re.compile(r"gloo/transport/\w+/\w+\.cc:\d+\]")  # gloo's errors have no type of their own: where they come from
# How often the same may happen at the same step: ranks that all found an error, or one that left without a word.
SAME_ERROR, SAME_LOSS = 2, 4


class Where(NamedTuple):
    """What a rank was doing. held: bytes of GPU memory allocated between two steps."""

    config: Config
    step: int
    phase: str
    held: int


def is_lost_connection(error: BaseException) -> bool:
    """Whether an error is of the connections between ranks, by its type; of gloo's RuntimeErrors, by their origin."""
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and bool(GLOO.search(str(error))))


class Peers:
    """The ranks of a run, this one included. All of them make it together."""

    def __init__(self, folder: Path, groups: Groups) -> None:
        self.folder, self.groups = folder / "stacks", groups
        self.start = from_main(uuid.uuid4().hex, groups)  # reports of an earlier start are not of this one
        self.crashes: IO[str] | None = None
        self.is_open = False

    def open(self) -> None:
        """The folder is the run's: reports may be written there, and what a crash of the interpreter leaves."""
        self.is_open = True
        with suppress(OSError):
            self.folder.mkdir(exist_ok=True)
            if not faulthandler.is_enabled():
                self.crashes = open(self._crash(self.groups.rank), "w")  # noqa: SIM115 - open as long as the process is
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
                self.folder.rmdir()  # where nothing else is in it

    @contextmanager
    def telling(self, where: Callable[[], Where]) -> Iterator[None]:
        """Tell the others of an error inside. Raises Stop for what is not the user's mistake."""
        if self.is_open:
            self.open()  # its file of crashes, which was closed at the end of the start
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
        """The end that an error means for this rank; the error itself where the run's folder is not its own yet."""
        at = f"rank {self.groups.rank}, step {where.step}, {where.phase}"
        if isinstance(error, Stop | UserError):
            code = error.code if isinstance(error, Stop) else 2
            if code not in TOGETHER:
                self._report(str(error), code)
            return error
        memory = out_of_memory(error, at, where)
        if memory is not None:
            self._report(str(memory), memory.code)
            return memory
        first = (str(error).splitlines() or [""])[0][:200]
        if is_lost_connection(error):
            self._report(first, STALLED, lost=True)
            self._write_traceback(error)
            return self._lost(error, at, first, where)
        if not self.is_open:
            return error
        text = f"{at}: {type(error).__name__}: {first}"
        self._report(text, FAILED)
        file = self._write_traceback(error)
        return error if file is None else Stop(f"{text}; nobody foresaw this: the whole traceback is in {file}", FAILED)

    def _lost(self, error: Exception, at: str, first: str, where: Where) -> Stop:
        found = self._gather()
        for rank, report in sorted(found.items()):
            if not report["lost"]:
                return Stop(f"{at}: rank {rank} has ended: {report['sentence']}", report["code"])
        silent = [rank for rank in range(self.groups.world_size) if rank not in found]
        for rank in silent:
            if self._crashed(rank):
                return Stop(f"{at}: rank {rank} has crashed: its stacks are in {self._crash(rank)}", FAILED)
        # Where a rank has left without a word, phase and text depend on when the others notice.
        same = [where.step, silent] if silent else [where.step, where.phase, re.sub(r"\d+", "", first)]
        times = self._times(same)
        if times >= (SAME_LOSS if silent else SAME_ERROR):
            return Stop(
                f"{at}: {first}; the same has happened {times} times at this step, so this is not a rank lost by "
                f"accident: look at {self.folder}, and remove it to try again",
                FAILED,
            )
        return Stop(f"{at}: another rank is gone ({first}); the same command goes on", STALLED)

    def _times(self, same: list[Any]) -> int:
        """How many starts in a row have ended in the same way on this rank, this one counted."""
        file = self.folder / f"lost-rank-{self.groups.rank:05d}.json"
        before: Any = _read_json(file)
        times = 1
        with suppress(KeyError, TypeError, ValueError):
            times += int(before["times"]) if before["same"] == json.loads(json.dumps(same)) else 0
        self._write(file, {"same": same, "times": times})
        return times

    def _report(self, sentence: str, code: int, lost: bool = False) -> None:
        report = {"start": self.start, "sentence": sentence, "code": code, "lost": lost}
        self._write(self._failure(self.groups.rank), report)

    def _gather(self) -> dict[int, dict[str, Any]]:
        """The reports of all ranks, this one's too, as far as they come in time."""
        end = time.monotonic() + GATHER_S
        while True:
            found = {}
            for rank in range(self.groups.world_size):
                report = _read_json(self._failure(rank))
                if isinstance(report, dict) and report.get("start") == self.start:
                    found[rank] = report
            decided = any(not report["lost"] for report in found.values())
            if decided or len(found) == self.groups.world_size or time.monotonic() > end:
                return found
            time.sleep(0.1)

    def _write(self, file: Path, content: dict[str, Any]) -> None:
        """Nothing where the disk is full: the others then take this rank for gone."""
        if not self.is_open:
            return
        with suppress(OSError):
            self.folder.mkdir(exist_ok=True)
            temporary = file.with_suffix(".tmp")
            temporary.write_text(json.dumps(content))
            os.replace(temporary, file)

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


def _read_json(file: Path) -> Any:
    try:
        return json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
