"""Where a run's checkpoints lie and how they were configured; reads no weights and needs no torch."""

import re
from pathlib import Path

from ssscale.config import from_yaml
from ssscale.errors import UserError
from ssscale.schema import Config

NAME = re.compile(r"step-(\d{8,})")


def step_of(checkpoint: Path) -> int:
    """The step after which a checkpoint of a run was saved."""
    return int(checkpoint.name.removeprefix("step-"))


def list_checkpoints(folder: Path) -> list[Path]:
    """The whole checkpoints of a run, oldest first."""
    found = [path for path in folder.glob("step-*") if NAME.fullmatch(path.name) and (path / "state.json").is_file()]
    return sorted(found, key=step_of)


def find_checkpoint(path: Path, option: str = "checkpoint") -> Path:
    """A checkpoint folder, given itself or its run's folder (the newest one there). Raises UserError naming the option."""
    if (path / "state.json").is_file():
        return path
    found = list_checkpoints(path / "checkpoints")
    if not found:
        problem = "neither a checkpoint nor a run folder that has one" if path.is_dir() else "there is no such folder"
        raise UserError(f"{option}={path}: {problem}")
    return found[-1]


def saved_config(checkpoint: Path) -> Config:
    """The configuration with which a checkpoint was trained. Raises UserError."""
    file = checkpoint / "config.yaml"
    try:
        return from_yaml(file.read_text(), str(file))
    except OSError as error:
        raise UserError(f"{checkpoint} is not a whole checkpoint: {error}") from error


def check_empty(out: Path) -> None:
    """Raise UserError where the folder that out= names holds something."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"out={out} exists and is not empty")
