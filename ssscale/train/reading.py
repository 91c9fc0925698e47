"""Reading a checkpoint of a run that may be training: it stays until it is read, or one sentence says that it is gone."""

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
from ssscale.train.checkpoint_folder import MANIFEST, Condition, Finding, is_checkpoint
from ssscale.train.files import patiently
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
    """A shared lock on a checkpoint's checksums.json, which its run tries to lock alone before it deletes.

    The kernel ends it with the process. Where a file system has no locks, `check` still notices the deletion.
    """

    def __init__(self, path: Path) -> None:
        """Raises Gone, or OSError where the file cannot be read."""
        self.path = path
        try:
            self.descriptor = os.open(path / MANIFEST, os.O_RDONLY | os.O_NONBLOCK)  # never waits for a pipe
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
        """Raises Gone where the path no longer leads to the file that was opened."""
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
    """Whether nobody reads the checkpoint. While True nobody begins to, either, except where there are no locks."""
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
            pass  # no locks here
        yield free
    finally:
        os.close(descriptor)


@contextmanager
def reading(given: Path, groups: Groups, option: str = "checkpoint", newest: bool = False) -> Iterator[Path]:
    """A checkpoint, or a run's newest whole one, that is whole for all that is read inside; all ranks call it alike.

    Its files have been compared with its checksums; a broken one is named and, in a run, the one before it taken, or with
    `newest` none. Raises UserError naming the option where there is none, and where the checkpoint was deleted while it
    was read.
    """
    hold = _open(given, groups, option, newest)
    try:
        try:
            yield hold.path
        except (UserError, OSError, SafetensorError):
            hold.check()  # else what was said is true
            raise
        hold.check()
    except Gone as gone:
        raise UserError(GONE.format(hold.path)) from gone
    finally:
        hold.close()


def _open(given: Path, groups: Groups, option: str, newest: bool) -> _Hold:
    """The checkpoint that `reading` takes, locked and compared with its checksums."""
    before: list[Path] | None = None
    problems: list[str] = []
    while True:
        alone = from_main("yes" if _on_all(lambda: is_checkpoint(given), given, groups) else "", groups)
        found = [given] if alone else list_together(given, groups)
        if not found or found == before:
            break  # else a run that trains has saved and deleted meanwhile
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
    """call() on this rank. Raises UserError on every rank where one of them cannot read what it reads."""
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
    """None where the checkpoint is gone on a rank."""

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
    """What is wrong with a checkpoint, which is let go then."""
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
