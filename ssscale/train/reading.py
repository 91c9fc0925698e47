"""Reads a checkpoint of a run that may be training. The checkpoint is kept until it is read, or an error says it is gone."""

import fcntl
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar, cast

from safetensors import SafetensorError

from ssscale.errors import UserError
from ssscale.parallel.groups import Groups
from ssscale.patience import patiently
from ssscale.train.checkpoint_folder import MANIFEST, Condition, Finding, is_checkpoint
from ssscale.train.whole import from_main, inspect_together, list_together, share

logger = logging.getLogger("ssscale")

T = TypeVar("T")

GONE = (
    "{} was deleted or replaced while it was read: run the same command again, or keep more checkpoints of a run that "
    "trains (train.keep)"
)


class Gone(Exception):  # noqa: N818 - what happened, not a mistake
    """The checkpoint has been deleted or replaced since it was opened."""


class _Hold:
    """A shared lock on a checkpoint's checksums.json. The run deletes a checkpoint only if it gets an exclusive lock.

    The kernel releases the lock when the process ends. If the file system has no locks, `check` still detects a deletion.
    """

    def __init__(self, path: Path) -> None:
        """Raises Gone if there is no such file, and OSError if it cannot be read."""
        self.path = path
        try:
            self.descriptor = os.open(path / MANIFEST, os.O_RDONLY | os.O_NONBLOCK)  # opening a pipe must not block
        except FileNotFoundError:
            raise Gone from None
        with suppress(OSError):
            fcntl.flock(self.descriptor, fcntl.LOCK_SH)
        try:
            self.check()
        except Gone:
            self.close()
            raise

    def check(self) -> None:
        """Raises Gone if the path no longer leads to the file that was opened."""
        try:
            same = os.path.samestat(os.stat(self.path / MANIFEST), os.fstat(self.descriptor))
        except OSError:  # ESTALE: deleted on another machine
            same = False
        if not same:
            raise Gone

    def close(self) -> None:
        os.close(self.descriptor)


@contextmanager
def unread(path: Path) -> Iterator[bool]:
    """Yields whether no process reads the checkpoint. While the body runs, none can start to.

    On a file system without locks it always yields True.
    """
    try:
        descriptor = os.open(path / MANIFEST, os.O_RDWR)
    except OSError:
        yield True
        return
    try:
        free = True
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            free = False
        except OSError:
            pass  # the file system has no locks
        yield free
    finally:
        os.close(descriptor)


@contextmanager
def reading(given: Path, groups: Groups, option: str = "checkpoint", newest: bool = False) -> Iterator[Path]:
    """Yields a whole checkpoint, which the run does not delete while the body runs. All ranks call it together.

    given: a checkpoint, or a run's folder, whose newest whole checkpoint is taken. With `newest`, only the newest
    checkpoint is considered. The files have been compared with their checksums, and broken checkpoints are logged.
    Raises UserError, naming `option`, if there is no whole checkpoint, and UserError if it was deleted while it was read.
    """
    hold = _open(given, groups, option, newest)
    try:
        try:
            yield hold.path
        except (UserError, OSError, SafetensorError):
            hold.check()  # if the checkpoint is gone, that is the cause of the error
            raise
        hold.check()
    except Gone as gone:
        raise UserError(GONE.format(hold.path)) from gone
    finally:
        hold.close()


def _open(given: Path, groups: Groups, option: str, newest: bool) -> _Hold:
    """Returns the checkpoint that `reading` yields, locked and compared with its checksums."""
    before: list[Path] | None = None
    problems: list[str] = []
    while True:
        alone = from_main("yes" if _on_all(lambda: is_checkpoint(given), given, groups) else "", groups)
        found = [given] if alone else list_together(given, groups)
        if not found or found == before:
            break  # otherwise a training run has saved and deleted meanwhile: look again
        before, problems = found, []
        for path in found[-1:] if newest else found[::-1]:
            hold = _hold_together(path, groups)
            if hold is None:
                problems.append(inspect_together(path, groups) or GONE.format(path))
            elif (problem := _inspect_held(hold, groups)) is None:
                return hold
            else:
                problems.append(problem)
            if groups.is_main and path != found[0] and not newest:
                logger.warning("%s; the checkpoint before it is taken", problems[-1])
    if problems:
        raise UserError(f"{option}={given}: {problems[0]}")
    raise UserError(f"{option}={given}: neither a checkpoint nor a run folder that has one")


def _on_all(call: Callable[[], T], path: Path, groups: Groups) -> T:
    """Returns call() of this rank. Raises UserError on all ranks if one of them cannot read `path`."""
    mine, answer = Finding(), None
    try:
        answer = patiently(call, path)
    except UserError as error:
        mine = Finding(Condition.UNREADABLE, str(error))
    worst = max(share(mine, groups), key=lambda finding: finding.condition)
    if worst.condition is not Condition.WHOLE:
        if isinstance(answer, _Hold):
            answer.close()
        raise UserError(worst.problem)
    return cast(T, answer)


def _hold_together(path: Path, groups: Groups) -> _Hold | None:
    """Locks a checkpoint on all ranks. Returns None, on all of them, if it is gone for one."""

    def hold() -> _Hold | None:
        try:
            return _Hold(path)
        except Gone:
            return None

    mine = _on_all(hold, path, groups)
    everywhere = all(
        finding.condition is Condition.WHOLE for finding in share(Finding(Condition(int(mine is None))), groups)
    )
    if mine is not None and not everywhere:
        mine.close()
    return mine if everywhere else None


def _inspect_held(hold: _Hold, groups: Groups) -> str | None:
    """Returns what is wrong with a checkpoint and releases its lock, or returns None if it is whole."""
    problem: str | None = "not read"
    try:
        problem = inspect_together(hold.path, groups)
        if problem is not None:
            hold.check()
    except Gone:
        problem = GONE.format(hold.path)
    finally:
        if problem is not None:
            hold.close()
    return problem
