"""The folder of a run: who may write to it, and whether a configuration continues what lies there."""

import json
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from pathlib import Path

import torch.distributed as dist

from ssscale.config import read_yaml, to_yaml
from ssscale.errors import UserError
from ssscale.parallel.groups import Groups
from ssscale.schema import Config
from ssscale.train.checkpoint import TrainState
from ssscale.train.lock import RunLock
from ssscale.train.whole import from_main, newest_whole, put_aside, record_first_save, step_of, write_file

logger = logging.getLogger("ssscale")

# A run cannot change these between a stop and its continuation: its weights or its data order would not fit.
FIXED = ("model", "data.length", "data.one_document", "data.shuffle_seed", "train.batch_size", "train.seed")

OURS = ("run.lock", "config.yaml.tmp", "slurm-")  # all that a start killed before config.yaml, or its job, leaves


def _value(config: Config, key: str) -> object:
    value: object = config
    for part in key.split("."):
        value = getattr(value, part)
    return value


def _first_difference(old: object, new: object, key: str) -> str | None:
    if hasattr(old, "__dataclass_fields__"):
        for field in fields(old):  # type: ignore[arg-type]
            found = _first_difference(getattr(old, field.name), getattr(new, field.name), f"{key}.{field.name}")
            if found:
                return found
        return None
    return f"{key} was {old} and is now {new}" if old != new else None


def check_folder(folder: Path, config: Config) -> None:
    """Raise UserError where `config` cannot continue what lies in the folder. Writes nothing."""
    try:
        _check_folder(folder, config)
    except OSError as error:
        raise UserError(f"run_dir={folder} cannot be read: {error.strerror}") from error


def _check_folder(folder: Path, config: Config) -> None:
    saved = folder / "config.yaml"
    if saved.is_file():
        old = read_yaml(saved)
        for key in FIXED:
            difference = _first_difference(_value(old, key), _value(config, key), key)
            if difference:
                raise UserError(
                    f"{folder} holds a run with another configuration: {difference}; "
                    "give run_dir=FOLDER for a new run, or the old value to continue"
                )
    elif folder.is_dir() and any(not path.name.startswith(OURS) for path in folder.iterdir()):
        raise UserError(f"run_dir={folder} holds something that is not a run; name an empty or a new folder")


class RunFolder:
    """A run's folder while a process trains there: locked, with the checkpoint that the run goes on from.

    Made by all ranks together. A folder that exists is locked before anything in it is read, and nothing but the lock is
    written before `take`. Raises UserError where the folder is not the configuration's run, is in use, or has lost its
    checkpoints.
    """

    def __init__(self, path: Path, config: Config, groups: Groups, slurm_job: str | None = None) -> None:
        self.path, self.groups, self.slurm_job = path, groups, slurm_job
        self.lock: RunLock | None = None
        check_folder(path, config)
        with self.opening():
            self._lock(create=False)
            self.choice = newest_whole(path, groups)

    @contextmanager
    def opening(self) -> Iterator[None]:
        """Release the lock where something inside fails."""
        try:
            yield
        except BaseException:
            self.release()
            raise

    def _lock(self, create: bool) -> None:
        dist.barrier()  # no rank writes before all have checked

        def acquire() -> None:
            if self.lock is None and (create or self.path.is_dir()):
                self.path.mkdir(parents=True, exist_ok=True)
                lock = RunLock(self.path, self.slurm_job)
                lock.acquire()
                self.lock = lock

        self._on_main(acquire)

    def take(self, config: Config) -> None:
        """Begin to write: record the merged configuration, put broken checkpoints aside. Raises UserError."""
        self._lock(create=True)

        def take() -> None:
            record_config(self.path, config)
            try_to_write(self.path / "checkpoints")
            put_aside(self.choice.broken)
            if self.choice.path is not None:
                record_first_save(self.path, step_of(self.choice.path))

        self._on_main(take)

    def _on_main(self, write: Callable[[], None]) -> None:
        """Call `write` on the main rank; where it fails, all ranks raise the same UserError."""
        problem = ""
        if self.groups.is_main:
            try:
                write()
            except OSError as error:
                where = f" ({error.filename})" if error.filename else ""
                problem = f"run_dir={self.path} cannot be written: {error.strerror}{where}"
            except UserError as error:
                problem = str(error)
        problem = from_main(problem, self.groups)
        if problem:
            raise UserError(problem)

    def find_again(self) -> Path | None:
        """The newest whole checkpoint as it is now; broken ones are put aside. Raises UserError."""
        self.choice = newest_whole(self.path, self.groups)
        self._on_main(lambda: put_aside(self.choice.broken))
        return self.choice.path

    def release(self) -> None:
        if self.lock is not None:
            self.lock.release()


def try_to_write(folder: Path) -> None:
    """Raise OSError now where no checkpoint could be written later."""
    folder.mkdir(exist_ok=True)
    trial = folder / ".trial.partial"  # which the next start removes, as all that is not committed
    trial.mkdir(exist_ok=True)
    trial.rmdir()


def record_config(folder: Path, config: Config) -> None:
    """Write the merged configuration to a folder that is locked. Raises OSError."""
    temporary = folder / "config.yaml.tmp"
    write_file(temporary, [memoryview(to_yaml(config).encode())])
    os.replace(temporary, folder / "config.yaml")


def write_rollback(folder: Path, state: TrainState) -> None:
    """Remember which rows a run passes over from now on, until a later checkpoint does.

    On a full disk that is said and training goes on: a run that is stopped before its next save rolls back once more.
    """
    file = folder / "rollback.json"
    text = json.dumps({"step": state.step, "skipped": state.skipped})
    try:
        write_file(file.with_suffix(".tmp"), [memoryview(text.encode())])
        os.replace(file.with_suffix(".tmp"), file)
    except OSError as error:
        logger.error("%s cannot be written: %s", file, error.strerror)


def read_rollback(folder: Path, state: TrainState) -> TrainState:
    """The state of a checkpoint, with the rows that were passed over after it was written."""
    file = folder / "rollback.json"
    if not file.is_file():
        return state
    try:
        saved = json.loads(file.read_bytes())
        skipped = tuple((int(step), int(rows)) for step, rows in saved["skipped"])
        return replace(state, skipped=skipped) if saved["step"] == state.step else state
    except OSError as error:
        raise UserError(f"{file} cannot be read: {error.strerror}") from error
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        raise UserError(
            f"{file} is broken ({error}): it names rows to pass over after NaN; remove it to train on them again"
        ) from error
