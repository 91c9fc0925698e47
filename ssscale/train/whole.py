"""Which checkpoints of a run are whole, which are broken, and which cannot be read for the moment.

Resuming, evaluating, exporting and deleting ask here. A checkpoint is *broken* where its files differ from its
checksums.json on every rank: it is named, passed over and, once the run goes on, put aside. It is *unreadable* where the
system refuses to read it (EIO, ESTALE, EACCES, ...) or where ranks see different files: that may pass, so it is tried again
for a while and then the command ends. Nothing is renamed or passed over for that reason.
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
from ssscale.train.checkpoint_folder import (
    FIRST_SAVE,
    Condition,
    Finding,
    inspect,
    list_checkpoints,
    step_of,
)
from ssscale.train.files import fsync_folder, patiently, retry_seconds, waits, write_file

logger = logging.getLogger("ssscale")


@dataclass(frozen=True)
class Choice:
    """The newest whole checkpoint of a run, None where it has not saved yet, and the broken ones that are newer."""

    path: Path | None
    broken: tuple[Path, ...] = ()


def newest_whole(run: Path, groups: Groups) -> Choice:
    """The newest whole checkpoint of a run, found by all ranks together; broken ones are named.

    Raises UserError on every rank where the checkpoints cannot be read, where none of them is whole, and where there is
    none although the run has saved one before.
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
    """The checkpoints as the main rank sees them."""
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
    """What is wrong with a checkpoint, None where it is whole: the same answer on all ranks, each of which reads a share.

    Raises UserError on every rank where one of them cannot read it, or sees other files than the others, for
    `retry_seconds`.
    """
    end = time.monotonic() + retry_seconds()
    for wait in waits():
        found = share(inspect(path, rank=groups.rank, world_size=groups.world_size), groups)
        if max(finding.condition for finding in found) is Condition.BROKEN:
            # The view of one machine may be old or its memory bad: all ranks look at what one of them found.
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
    """Every rank's finding."""
    answers = gather_json([int(mine.condition), mine.problem, mine.file, socket.gethostname()])
    return [Finding(Condition(condition), *texts) for condition, *texts in answers]


def from_main(text: str, groups: Groups) -> str:
    """The main rank's text on all ranks."""
    data = bytearray(text.encode(errors="backslashreplace"))  # a path need not be UTF-8
    size = torch.tensor([len(data)])
    dist.broadcast(size, 0)
    if not int(size):
        return ""
    buffer = torch.frombuffer(data, dtype=torch.uint8) if groups.is_main else torch.zeros(int(size), dtype=torch.uint8)
    dist.broadcast(buffer, 0)
    return bytes(buffer.tolist()).decode()


def put_aside(checkpoints: Iterable[Path]) -> None:
    """Rename broken checkpoints, so that they are never counted or chosen again; the caller holds the run's lock.

    Raises OSError. A later save deletes them (`superseded`).
    """
    for path in checkpoints:
        names = (
            f"{path.name}.broken{suffix}" for suffix in itertools.chain([""], map("-{}".format, itertools.count(2)))
        )
        aside = next(path.with_name(name) for name in names if not os.path.lexists(path.with_name(name)))
        os.replace(path, aside)
        logger.error("%s is broken and put aside as %s; a save of its step or a later one deletes it", path, aside.name)


def superseded(folder: Path, step: int) -> list[Path]:
    """The checkpoints that were put aside and are not newer than `step`."""
    return [path for path in folder.glob("step-*.broken*") if step_of(path) <= step]


def record_first_save(run: Path, step: int) -> None:
    """Put on record, once, that the run has committed a checkpoint: without one it never begins again by itself.

    Raises OSError.
    """
    if os.path.lexists(run / FIRST_SAVE):
        return
    temporary = run / f"{FIRST_SAVE}.tmp"
    write_file(temporary, [memoryview(json.dumps({"step": step}).encode())])
    os.replace(temporary, run / FIRST_SAVE)
    fsync_folder(run)
