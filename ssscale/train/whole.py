"""Decides which checkpoints of a run are whole, which are broken, and which cannot be read at the moment.

Resuming, evaluation, export and deletion use it. A checkpoint is *broken* if every rank finds that its files differ from
its checksums.json. Broken checkpoints are logged and skipped, and put aside once the run continues. A checkpoint is
*unreadable* if the system cannot read it (EIO, ESTALE, EACCES, ...) or if ranks see different files. This may be temporary,
so reading is retried for a while, and then the command ends. An unreadable checkpoint is neither renamed nor skipped.
"""

import itertools
import json
import logging
import os
import socket
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from ssscale.errors import UserError
from ssscale.parallel.exchange import gather_json
from ssscale.parallel.groups import Groups
from ssscale.patience import patiently, retry_seconds, waits
from ssscale.train.checkpoint_folder import (
    FIRST_SAVE,
    Condition,
    Finding,
    inspect,
    list_checkpoints,
    step_of,
)
from ssscale.train.files import fsync_folder, write_file

logger = logging.getLogger("ssscale")


@dataclass(frozen=True)
class Choice:
    """path: the newest whole checkpoint of a run; None if it has not saved yet. broken: the broken ones after it."""

    path: Path | None
    broken: tuple[Path, ...] = ()


def newest_whole(run: Path, groups: Groups) -> Choice:
    """Finds the newest whole checkpoint of a run and logs the broken ones. All ranks call it together.

    Raises UserError on all ranks if the checkpoints cannot be read, if none of them is whole, or if there are none
    although the run has saved before.
    """
    broken: list[Path] = []
    problem = None
    for path in reversed(list_together(run, groups)):
        found = inspect_together(path, groups)
        if found is None:
            return Choice(path, tuple(broken))
        if groups.is_main:
            logger.error("%s; the checkpoint before it is taken", found)
        broken.append(path)
        problem = problem or found
    if problem is not None:
        raise UserError(f"{run / 'checkpoints'} has no whole checkpoint left ({problem}): {_how_to_begin_again(run)}")
    return Choice(None)


def _how_to_begin_again(run: Path) -> str:
    return f"restore one, or begin again with another run_dir or after moving {run} away"


def list_together(run: Path, groups: Groups) -> list[Path]:
    """Returns the checkpoints that the main rank sees, oldest first. Raises UserError on all ranks."""
    folder, answer = run / "checkpoints", ""
    if groups.is_main:
        try:
            found = patiently(lambda: list_checkpoints(folder), folder)
            if not found and os.path.lexists(run / FIRST_SAVE):
                raise UserError(
                    f"{run} has saved checkpoints before ({FIRST_SAVE}) and {folder} has none now: {_how_to_begin_again(run)}"
                )
            answer = json.dumps([[path.name for path in found], None])
        except UserError as error:
            answer = json.dumps([[], str(error)])
    names, problem = json.loads(from_main(answer, groups))
    if problem is not None:
        raise UserError(problem)
    return [folder / name for name in names]


def inspect_together(path: Path, groups: Groups) -> str | None:
    """Returns what is wrong with a checkpoint, or None if it is whole. The result is the same on all ranks.

    Each rank reads a share of the files. Raises UserError on all ranks if, for `retry_seconds`, one of them cannot read
    its share or the ranks see different files.
    """
    end = time.monotonic() + retry_seconds()
    for wait in waits():
        found = share(inspect(path, rank=groups.rank, world_size=groups.world_size), groups)
        if max(finding.condition for finding in found) is Condition.BROKEN:
            # One machine may have a stale view or bad memory, so all ranks check the files that any of them found broken.
            names = {finding.file for finding in found if finding.condition is Condition.BROKEN}
            found = share(inspect(path, names), groups)
        conditions = {finding.condition for finding in found}
        if conditions == {Condition.WHOLE}:
            return None
        if conditions == {Condition.BROKEN}:
            return found[0].problem
        rank, finding = max(enumerate(found), key=lambda entry: entry[1].condition)
        problem = f"rank {rank} on {finding.host}: {finding.problem}"
        if finding.condition is Condition.BROKEN:
            problem += ", which other ranks do not find"
        if from_main("late" if time.monotonic() > end else "", groups):
            raise UserError(f"{problem}; nothing there was changed: mend the disk, or move {path} away")
        if groups.is_main:
            logger.warning("%s; trying again", problem)
        time.sleep(wait)
    raise AssertionError


def share(mine: Finding, groups: Groups) -> list[Finding]:
    """Returns the findings of all ranks, with their hosts."""
    answers = gather_json([int(mine.condition), mine.problem, mine.file, socket.gethostname()])
    return [Finding(Condition(condition), *texts) for condition, *texts in answers]


def from_main(text: str, groups: Groups) -> str:
    """Returns the main rank's text on all ranks."""
    data = bytearray(text.encode(errors="backslashreplace"))  # the text may contain a path that is not UTF-8
    size = torch.tensor([len(data)])
    dist.broadcast(size, 0)
    if not int(size):
        return ""
    buffer = torch.frombuffer(data, dtype=torch.uint8) if groups.is_main else torch.zeros(int(size), dtype=torch.uint8)
    dist.broadcast(buffer, 0)
    return bytes(buffer.tolist()).decode()


def put_aside(checkpoints: Iterable[Path]) -> None:
    """Renames broken checkpoints, so that they are never counted or chosen again. The caller must hold the run's lock.

    A later save deletes them (`superseded`). Raises OSError.
    """
    for path in checkpoints:
        names = (
            f"{path.name}.broken{suffix}" for suffix in itertools.chain([""], map("-{}".format, itertools.count(2)))
        )
        aside = next(path.with_name(name) for name in names if not os.path.lexists(path.with_name(name)))
        os.replace(path, aside)
        logger.error("%s is broken and put aside as %s; a save of its step or a later one deletes it", path, aside.name)


def superseded(folder: Path, step: int) -> list[Path]:
    """Returns the checkpoints that were put aside and are not newer than `step`."""
    return [path for path in folder.glob("step-*.broken*") if step_of(path) <= step]


def record_first_save(run: Path, step: int) -> None:
    """Records that the run has committed a checkpoint, unless this is recorded already. Raises OSError.

    If all checkpoints are lost later, the run then stops with an error instead of silently starting from the beginning.
    """
    if os.path.lexists(run / FIRST_SAVE):
        return
    temporary = run / f"{FIRST_SAVE}.tmp"
    write_file(temporary, [memoryview(json.dumps({"step": step}).encode())])
    os.replace(temporary, run / FIRST_SAVE)
    fsync_folder(run)
