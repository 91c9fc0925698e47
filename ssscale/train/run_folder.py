"""The files of a run folder, and whether a configuration can continue the run in it.

Imports no torch, so that `check_folder` can run before torch is imported. `ssscale.train.claim` takes a folder into use.
"""

import json
import logging
import os
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING

from ssscale.config import read_yaml, to_yaml
from ssscale.config.kinds import spelled
from ssscale.config.schema import Config
from ssscale.errors import UserError
from ssscale.train.checkpoint_folder import SMALL, Condition, inspect, list_checkpoints, saved_config, step_of
from ssscale.train.files import move_folder_aside, write_file
from ssscale.train.stages import Plan, read_returns

if TYPE_CHECKING:
    from ssscale.train.checkpoint import TrainState

logger = logging.getLogger("ssscale")

# A run must resume with the same values of these keys. Otherwise its weights, the meaning of its optimizer's states or
# the order of its data would not match.
FIXED = (
    "model",
    "optimizer.name",
    "data.length",
    "data.one_document",
    "data.shuffle_seed",
    "train.batch_size",
    "train.seed",
)

# All that a start, or its Slurm job, leaves in the folder if it is killed before config.yaml is written.
OURS = ("run.lock", "config.yaml.tmp", "slurm-")


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
    return f"{key} was {spelled(old)} and is now {spelled(new)}" if old != new else None


def check_folder(folder: Path, config: Config) -> None:
    """Raises UserError if `config` cannot continue the run in the folder, or start one there. Writes nothing."""
    try:
        _check_folder(folder, config)
    except OSError as error:
        raise UserError(f"run_dir={folder} cannot be read: {error.strerror}") from error


def _check_folder(folder: Path, config: Config) -> None:
    try:
        difference = _difference(read_yaml(folder / "config.yaml"), config)
        problem = difference and (
            f"{folder} holds a run with another configuration: {difference}; "
            "give run_dir=FOLDER for a new run, or the old value to continue"
        )
    except FileNotFoundError:
        holds = folder.is_dir() and any(not path.name.startswith(OURS) for path in folder.iterdir())
        problem = (
            f"run_dir={folder} holds something that is not a run; give an empty or a new folder" if holds else None
        )
    except UserError as error:
        if isinstance(error.__cause__, OSError) and not isinstance(error.__cause__, IsADirectoryError):
            raise error.__cause__ from None  # a file that cannot be read at the moment may be intact
        problem = str(error)
    if problem and not _continues_checkpoint(folder, config):
        raise UserError(problem)


def _difference(old: Config, new: Config) -> str | None:
    """Returns a description of the first key of FIXED whose value differs, or None."""
    return next(filter(None, (_first_difference(_value(old, key), _value(new, key), key) for key in FIXED)), None)


def _continues_checkpoint(folder: Path, config: Config) -> bool:
    """Whether `config` continues the newest whole checkpoint.

    Its copy of the configuration is more reliable than that of the run, because it has a checksum.
    """
    for path in reversed(list_checkpoints(folder / "checkpoints")):
        if inspect(path, SMALL).condition is Condition.WHOLE:
            plan = Plan(config)
            stage = plan.at(max(step_of(path) - 1, 0)).stage  # of the checkpoint's last step
            return _difference(saved_config(path), plan.configs[stage]) is None
    return False


def record_config(folder: Path, config: Config) -> None:
    """Writes the merged configuration to a run folder, which must be locked. Raises OSError."""
    temporary = folder / "config.yaml.tmp"
    move_folder_aside(temporary)
    write_file(temporary, [memoryview(to_yaml(config).encode())])
    move_folder_aside(folder / "config.yaml")
    os.replace(temporary, folder / "config.yaml")


def write_rollback(folder: Path, state: "TrainState") -> None:
    """Saves which rows the run leaves out after a rollback, until its next checkpoint saves them.

    If the file cannot be written, an error is logged and training continues. If the run is then stopped before its next
    save, it has to roll back again.
    """
    file = folder / "rollback.json"
    text = json.dumps({"step": state.step, "skipped": state.skipped})
    try:
        write_file(file.with_suffix(".tmp"), [memoryview(text.encode())])
        os.replace(file.with_suffix(".tmp"), file)
    except OSError as error:
        logger.error("%s cannot be written: %s", file, error.strerror)


def read_rollback(folder: Path, state: "TrainState") -> "TrainState":
    """Returns the state of a checkpoint, with the rows to leave out that `write_rollback` has saved for it.

    The file is of this checkpoint if it adds returns to its step, and nothing else, to what the checkpoint leaves out. It
    stays after the run has gone on, and the step may have been trained again from an earlier checkpoint since.

    Raises UserError if rollback.json is broken or cannot be read.
    """
    file = folder / "rollback.json"
    if not file.is_file():
        return state
    try:
        saved = json.loads(file.read_bytes())
        skipped = read_returns(saved["skipped"])
        before, returns = skipped[: len(state.skipped)], skipped[len(state.skipped) :]
        here = saved["step"] == state.step and before == state.skipped
        return (
            replace(state, skipped=skipped)
            if here and all(rollback.to == state.step for rollback in returns)
            else state
        )
    except OSError as error:
        raise UserError(f"{file} cannot be read: {error.strerror}") from error
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        raise UserError(
            f"{file} is broken ({error}): it lists the rows to skip after NaN; remove it to train on them again"
        ) from error
