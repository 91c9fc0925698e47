"""Which checkpoints of a run are whole, which are broken, and which cannot be read for the moment.

Resuming, evaluating, exporting and deleting ask here. A checkpoint is *broken* where its files differ from its
checksums.json on every rank: it is named, passed over and, once the run goes on, put aside. It is *unreadable* where the
system refuses to read it (EIO, ESTALE, EACCES, ...) or where ranks see different files: that may pass, so it is tried again
for a while and then the command ends. Nothing is renamed or passed over for that reason.
"""

import errno
import itertools
import json
import logging
import os
import re
import socket
import stat
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import xxhash

from ssscale.errors import UserError
from ssscale.names import is_plain
from ssscale.parallel.exchange import gather_json
from ssscale.parallel.groups import Groups

logger = logging.getLogger("ssscale")

CHUNK = 2**26  # bytes read at once
NAME = re.compile(r"step-([0-9]{8,})")
MANIFEST = "checksums.json"
FIRST_SAVE = "first_save.json"  # in the run's folder: a checkpoint of it has been committed once
MISSING = (errno.ENOENT, errno.ENOTDIR)
DAMAGED = (errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG)  # no other attempt will find a file there

T = TypeVar("T")


class Condition(IntEnum):
    WHOLE = 0
    BROKEN = 1
    UNREADABLE = 2


@dataclass(frozen=True)
class Finding:
    """What a look at a checkpoint has shown. problem: a clause that names the file; file: its name within the folder.

    host: that of the rank that looked, in what `share` returns.
    """

    condition: Condition = Condition.WHOLE
    problem: str = ""
    file: str = ""
    host: str = ""


@dataclass(frozen=True)
class Choice:
    """The newest whole checkpoint of a run, None where it has not saved yet, and the broken ones that are newer."""

    path: Path | None
    broken: tuple[Path, ...] = ()


def step_of(path: Path) -> int:
    """The step of a checkpoint, from its folder's name."""
    found = NAME.match(path.name)
    assert found is not None, path
    return int(found.group(1))


def checkpoint_path(folder: Path, step: int) -> Path:
    return folder / f"step-{step:08d}"


def list_checkpoints(folder: Path) -> list[Path]:
    """The checkpoints in a folder by their names, oldest first, whole or not; none where there is no such folder.

    Raises UserError where the folder is a link that leads nowhere, OSError where it cannot be listed.
    """
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        if folder.is_symlink():
            target = f"{folder} is a link to {os.readlink(folder)}, which does not exist"
            raise UserError(f"{target}: mount that disk, or remove the link") from None
        return []
    found = [folder / name for name in names if NAME.fullmatch(name)]
    return sorted((path for path in found if path.is_symlink() or path.is_dir()), key=step_of)


def checksum(file: Path) -> str:
    """XXH3-128 of a file, in hexadecimal digits."""
    digest = xxhash.xxh3_128()
    with open(file, "rb", buffering=0) as opened:
        while chunk := opened.read(CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def inspect(path: Path, names: Iterable[str] | None = None, rank: int = 0, world_size: int = 1) -> Finding:
    """Compare a checkpoint with its checksums.json: names and sizes of all files, contents of some.

    names: the files whose contents are read; None: those that fall to `rank` of `world_size`.
    """
    name = MANIFEST
    try:
        if path.is_symlink() and not path.exists():
            problem = f"{path} is a link to {os.readlink(path)}, which does not exist"
            return Finding(Condition.UNREADABLE, problem, MANIFEST)
        entries = _read_manifest(path)
        for name in sorted(entries):
            size = (path / name).stat().st_size
            if size != entries[name]["bytes"]:
                problem = f"{path / name} has {size:,} bytes, not {entries[name]['bytes']:,}"
                return Finding(Condition.BROKEN, problem, name)
        share = sorted(entries)[rank::world_size] if names is None else sorted(entries.keys() & set(names))
        for name in share:
            if checksum(path / name) != entries[name]["xxh3"]:
                return Finding(Condition.BROKEN, f"{path / name} is broken: its checksum is another", name)
        name = MANIFEST
        missing = _missing(path, entries)
    except OSError as error:
        if error.errno in MISSING:
            return Finding(Condition.BROKEN, f"{path / name} is missing", name)
        condition = Condition.BROKEN if error.errno in DAMAGED else Condition.UNREADABLE
        return Finding(condition, f"{path / name} cannot be read: {error.strerror}", name)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        return Finding(Condition.BROKEN, f"{path / name} is broken: {error}", name)
    if missing is not None:
        return Finding(Condition.BROKEN, f"{path / MANIFEST} is broken: it does not name {missing}", MANIFEST)
    return Finding()


def verify(path: Path) -> str | None:
    """What is wrong with a checkpoint, naming the file; None where it is whole. Reads all of it in this process."""
    return inspect(path).problem or None


def _read_manifest(path: Path) -> dict[str, dict[str, Any]]:
    """Raises OSError or, for what a writer would not have written, ValueError."""
    if not stat.S_ISREG(os.stat(path / MANIFEST).st_mode):
        raise ValueError("it is not a file")  # a pipe would be waited for
    entries: dict[str, dict[str, Any]] = json.loads((path / MANIFEST).read_bytes())
    if not isinstance(entries, dict):
        raise ValueError("it holds no table of files")
    for name in entries:
        if not is_plain(name):
            raise ValueError(f"{name!r} is not the name of a file in this folder")
    return entries


def _missing(path: Path, entries: dict[str, dict[str, Any]]) -> str | None:
    """A file that every checkpoint has and the manifest does not name. Raises ValueError for a broken state.json."""
    for name in ("state.json", "config.yaml"):
        if name not in entries:
            return name
    ranks = json.loads((path / "state.json").read_bytes())["ranks"]
    if type(ranks) is not int or ranks < 1:
        raise ValueError(f"state.json gives it {ranks!r} ranks")
    every = (f"rank-{rank:05d}.{kind}" for rank in range(ranks) for kind in ("json", "safetensors"))
    return next((name for name in every if name not in entries), None)


def retry_seconds() -> float:
    """How long something unreadable is tried again: SSSCALE_READ_RETRY_S, 30 seconds where it is not set."""
    text = os.environ.get("SSSCALE_READ_RETRY_S", "30")
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < 1e9:
        raise UserError(f"SSSCALE_READ_RETRY_S={text} is not a number of seconds")
    return seconds


def patiently(call: Callable[[], T], what: Path) -> T:
    """call(), again while it raises OSError. Raises UserError when it still does after `retry_seconds`."""
    end = time.monotonic() + retry_seconds()
    for wait in _waits():
        try:
            return call()
        except OSError as error:
            if time.monotonic() > end:
                raise UserError(f"{what} cannot be read: {error.strerror}; nothing there was changed") from error
            logger.warning("%s cannot be read: %s; trying again", what, error.strerror)
            time.sleep(wait)
    raise AssertionError


def _waits() -> Iterable[float]:
    return itertools.chain((0.5, 1.0, 2.0, 4.0), itertools.repeat(8.0))


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
    for wait in _waits():
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


def write_file(path: Path, chunks: list[memoryview]) -> dict[str, Any]:
    """Write and flush a file; its size and checksum."""
    digest, size = xxhash.xxh3_128(), 0
    with open(path, "wb", buffering=0) as file:
        for chunk in chunks:
            digest.update(chunk)
            size += len(chunk)
            while chunk:
                chunk = chunk[file.write(chunk) :]
        os.fsync(file.fileno())
    return {"bytes": size, "xxh3": digest.hexdigest()}


def fsync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
