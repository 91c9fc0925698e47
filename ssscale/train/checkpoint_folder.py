"""Finds a run's checkpoints, reads their configuration and checks whether they are whole. Imports no torch.

A checkpoint is *broken* if its files differ from its checksums.json. It is *unreadable* if the system cannot read it (EIO,
ESTALE, EACCES, ...), which may be temporary. `ssscale.train.whole` asks all ranks.
"""

import errno
import json
import logging
import os
import re
import stat
from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any

from ssscale.config import read_yaml
from ssscale.config.schema import Config
from ssscale.errors import UserError
from ssscale.names import is_plain
from ssscale.patience import patiently
from ssscale.train.files import checksum

logger = logging.getLogger("ssscale")

NAME = re.compile(r"step-([0-9]{8,})")
MANIFEST = "checksums.json"
SMALL = ("config.yaml", "state.json")  # files whose checksums are checked before torch is imported
FIRST_SAVE = "first_save.json"  # in the run's folder; records that the run has committed a checkpoint
MISSING = (errno.ENOENT, errno.ENOTDIR)
DAMAGED = (errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG)  # trying again cannot help


class Condition(IntEnum):
    WHOLE = 0
    BROKEN = 1
    UNREADABLE = 2


@dataclass(frozen=True)
class Finding:
    """The result of inspecting a checkpoint.

    problem: a clause that names the file, empty if the checkpoint is whole. file: the name of that file in the folder.
    host: the host of the rank that inspected it. Only `ssscale.train.whole.share` sets it.
    """

    condition: Condition = Condition.WHOLE
    problem: str = ""
    file: str = ""
    host: str = ""


def step_of(path: Path) -> int:
    """Returns the step in the name of a checkpoint's folder."""
    found = NAME.match(path.name)
    assert found is not None, path
    return int(found.group(1))


def checkpoint_path(folder: Path, step: int) -> Path:
    return folder / f"step-{step:08d}"


def list_checkpoints(folder: Path) -> list[Path]:
    """Returns the paths in a folder that are named like checkpoints, oldest first, whole or not.

    The list is empty if the folder does not exist. Raises UserError if the folder is a link to a missing target, and
    OSError if it cannot be listed.
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


def inspect(path: Path, names: Iterable[str] | None = None, rank: int = 0, world_size: int = 1) -> Finding:
    """Compares a checkpoint with its checksums.json: the sizes of all files, and the contents of some.

    names: files whose contents are read. None: the share of the files that `rank` of `world_size` ranks reads.
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
                return Finding(Condition.BROKEN, f"{path / name} is broken: its checksum does not match", name)
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


def intact(path: Path) -> bool:
    """Whether nothing is known to be wrong with a checkpoint. Checks sizes and small files; does not read weights."""
    return inspect(path, SMALL).condition is not Condition.BROKEN


def verify(path: Path) -> str | None:
    """Returns what is wrong with a checkpoint, naming the file, or None if it is whole. Reads all files in this process."""
    return inspect(path).problem or None


def _read_manifest(path: Path) -> dict[str, dict[str, Any]]:
    """Returns the entries of checksums.json. Raises OSError, and ValueError if we cannot have written the file."""
    if not stat.S_ISREG(os.stat(path / MANIFEST).st_mode):
        raise ValueError("it is not a file")  # reading a pipe would block
    entries: dict[str, dict[str, Any]] = json.loads((path / MANIFEST).read_bytes())
    if not isinstance(entries, dict):
        raise ValueError("it does not hold a table of files")
    for name in entries:
        if not is_plain(name):
            raise ValueError(f"{name!r} is not the name of a file in this folder")
    return entries


def _missing(path: Path, entries: dict[str, dict[str, Any]]) -> str | None:
    """Returns a required file that checksums.json does not name, or None. Raises ValueError if state.json is broken."""
    for name in ("state.json", "config.yaml"):
        if name not in entries:
            return name
    ranks = json.loads((path / "state.json").read_bytes())["ranks"]
    if type(ranks) is not int or ranks < 1:
        raise ValueError(f"state.json says that {ranks!r} ranks wrote it")
    every = (f"rank-{rank:05d}.{kind}" for rank in range(ranks) for kind in ("json", "safetensors"))
    return next((name for name in every if name not in entries), None)


def is_checkpoint(path: Path) -> bool:
    return (path / MANIFEST).is_file() or (path / "state.json").is_file()


def find_checkpoint(path: Path, option: str = "checkpoint", newest: bool = False, quiet: bool = False) -> Path:
    """Returns a checkpoint: `path` itself, or the newest `intact` checkpoint if `path` is a run's folder.

    Broken checkpoints are skipped, and logged unless `quiet`. With `newest`, only the newest checkpoint is considered.
    Raises UserError, naming `option`, if there is no such checkpoint.
    """
    if patiently(path.is_file, path):
        raise UserError(f"{option}={path}: this is a file, neither a checkpoint nor a run folder")
    if patiently(lambda: is_checkpoint(path), path):
        return path
    folder, problem = path / "checkpoints", ""
    before: list[Path] | None = None
    while True:
        found = patiently(lambda: list_checkpoints(folder), folder)
        if not found or found == before:
            break  # otherwise a training run has saved and deleted meanwhile: look again
        before, problem = found, ""
        for checkpoint in reversed(found):
            finding = inspect(checkpoint, SMALL)
            if finding.condition is not Condition.BROKEN:
                return checkpoint
            problem = problem or finding.problem
            if newest:
                break
            if not quiet:
                logger.warning("%s; the checkpoint before it is taken", finding.problem)
    if problem and newest:
        raise UserError(f"{option}={path}: {problem}")
    is_there = "neither a checkpoint nor a run folder that has one" if path.is_dir() else "there is no such folder"
    raise UserError(f"{option}={path}: {is_there}{problem and f': {problem}'}")


def saved_config(checkpoint: Path) -> Config:
    """Returns the configuration with which a checkpoint was trained. Raises UserError if it cannot be read."""
    try:
        return read_yaml(checkpoint / "config.yaml")
    except OSError as error:
        raise UserError(f"{checkpoint} is not a whole checkpoint: {error}") from error


def check_empty(out: Path) -> None:
    """Raises UserError if `out`, the folder that the option out= names, is a file, or exists and is not empty."""
    if out.exists() and not out.is_dir():
        raise UserError(f"out={out} is a file, not a folder: name a folder that is empty or does not exist yet")
    if out.exists() and any(out.iterdir()):
        raise UserError(f"out={out} exists and is not empty")
