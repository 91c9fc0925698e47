"""The folder of a run: who may write to it, and whether a configuration continues what lies there.

Imports no torch at its top, for `check_folder`.
"""

import json
import os
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING

from ssscale.config import from_yaml, to_yaml
from ssscale.errors import UserError
from ssscale.schema import Config

if TYPE_CHECKING:
    from ssscale.parallel.groups import Groups
    from ssscale.train.checkpoint import TrainState
    from ssscale.train.lock import RunLock

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
        old = from_yaml(saved.read_text(), str(saved))
        for key in FIXED:
            difference = _first_difference(_value(old, key), _value(config, key), key)
            if difference:
                raise UserError(
                    f"{folder} holds a run with another configuration: {difference}; "
                    "give run_dir=FOLDER for a new run, or the old value to continue"
                )
    elif folder.is_dir() and any(not path.name.startswith(OURS) for path in folder.iterdir()):
        raise UserError(f"run_dir={folder} holds something that is not a run; name an empty or a new folder")


def claim_folder(folder: Path, config: Config, groups: "Groups", slurm_job: str | None = None) -> "RunLock | None":
    """Make the run's folder, lock it and record the merged configuration; `check_folder` has allowed it on every rank.

    Returns the main rank's lock. Raises UserError where another run is using the folder or it cannot be written.
    """
    import torch.distributed as dist  # which takes seconds: `check_folder` answers before that

    from ssscale.train.lock import RunLock

    dist.barrier()  # no rank writes before all have checked
    lock = None
    if groups.is_main:
        saved = folder / "config.yaml"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            lock = RunLock(folder, slurm_job)
            lock.acquire()
            temporary = saved.with_name("config.yaml.tmp")
            temporary.write_text(to_yaml(config))
            os.replace(temporary, saved)
        except OSError as error:
            raise UserError(f"run_dir={folder} cannot be written: {error.strerror}") from error
    dist.barrier()
    return lock


def write_rollback(folder: Path, state: "TrainState") -> None:
    """Remember which rows a run passes over from now on, until a later checkpoint does."""
    from ssscale.train.save import write_file

    file = folder / "rollback.json"
    text = json.dumps({"step": state.step, "skipped": state.skipped})
    write_file(file.with_suffix(".tmp"), [memoryview(text.encode())])
    os.replace(file.with_suffix(".tmp"), file)


def read_rollback(folder: Path, state: "TrainState") -> "TrainState":
    """The state of a checkpoint, with the rows that were passed over after it was written."""
    file = folder / "rollback.json"
    if not file.is_file():
        return state
    saved = json.loads(file.read_text())
    if saved["step"] != state.step:
        return state
    return replace(state, skipped=tuple((step, rows) for step, rows in saved["skipped"]))
