"""Reads and writes evaluation results, one JSON file per checkpoint: RUN/eval/step-00001000.json.

This file holds results of whole tasks with their default settings. Other settings have folders of their own.
"""

import fcntl
import itertools
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ssscale.errors import UserError
from ssscale.options import check_once
from ssscale.train.files import replacing

FOLDER = "eval"
TASK, LOSS = {"metric", "value", "stderr", "chance", "items"}, {"nats_per_token", "bits_per_byte"}


def run_folder(checkpoint: Path) -> Path:
    """Return the run folder of a checkpoint, or the checkpoint folder itself if it is not inside a run."""
    absolute = checkpoint.resolve()
    return checkpoint.parent.parent if absolute.parent.name == "checkpoints" else checkpoint


def results_file(checkpoint: Path, changes: Sequence[str] = (), out: str | None = None) -> Path:
    """Return the results file of a checkpoint.

    changes: settings that differ from the defaults, as `key=value` of the model or of the evaluation, such as
    limit=100. Their results go into a folder named after them. So results of different settings never replace each
    other.
    out: a folder in place of RUN/eval, or a .json file that is used for all settings.
    Raises UserError if one key is changed twice: the order would count, which the folder's name does not tell.
    """
    check_keys(changes)
    if out is not None and out.endswith(".json"):
        return Path(out)
    folder = run_folder(checkpoint) / FOLDER if out is None else Path(out)
    if changes:
        folder /= ",".join(sorted(change.replace("/", "_") for change in changes))
    return folder / f"{checkpoint.resolve().name}.json"


def check_keys(changes: Sequence[str]) -> None:
    """Raise UserError if changes such as `key=value` name one key twice, or a key and its section."""
    check_once(changes)
    keys = sorted(change.partition("=")[0] for change in changes)
    for key, later in itertools.pairwise(keys):
        if later.startswith(f"{key}."):
            raise UserError(
                f"{key} and {later}, which is in it, are both changed: give it once, as results are kept by their changes "
                "in any order"
            )


def check_same(file: Path, checkpoint: Path, settings: dict[str, Any]) -> None:
    """Raise UserError if the file that `out=` names holds results of another checkpoint or of other settings."""
    before = read_results(file)
    if "checkpoint" in before:
        place = Path(before["checkpoint"]).parts[-3:]  # RUN/checkpoints/step-XXXXXXXX
        if place[-1] != checkpoint.resolve().name or place[0] != checkpoint.resolve().parts[-len(place)]:
            raise UserError(f"out: {file} holds results of {before['checkpoint']}; name another file or folder")
    other = [key for key, value in settings.items() if before.get("settings", settings).get(key) != value]
    if other:
        had, now = (f"{other[0]}={found.get(other[0])}" for found in (before["settings"], settings))
        raise UserError(f"out: {file} holds results with {had}, not {now}; name another file, or a folder")


def read_results(file: Path) -> dict[str, Any]:
    """Return the content of a results file, or {} if it is missing. Raises UserError if it is broken."""
    if not file.is_file():
        return {}
    try:
        results = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{file} is broken: {error}; remove it and evaluate again") from error
    if not isinstance(results, dict):
        raise UserError(f"{file} is broken: it is not a JSON object; remove it and evaluate again")
    tasks = results.get("tasks", {})
    losses = [results[key] for key in ("valid", "baseline") if key in results]
    whole = isinstance(tasks, dict) and all(isinstance(task, dict) and task.keys() >= TASK for task in tasks.values())
    if not whole or not all(isinstance(loss, dict) and loss.keys() >= LOSS for loss in losses):
        raise UserError(f"{file} is broken: it does not contain results; remove it and evaluate again")
    return results


def check_writable(file: Path) -> None:
    """Raise UserError if results could not be written to the file. Called before the evaluation starts."""
    folder = next(parent for parent in file.absolute().parents if parent.is_dir())
    if not os.access(folder, os.W_OK | os.X_OK, effective_ids=os.access in os.supports_effective_ids):
        raise UserError(
            f"the results belong in {file}, but {folder} cannot be written: Permission denied, or it is read-only"
        )


def add_results(file: Path, results: dict[str, Any]) -> None:
    """Merge results into a results file. Tasks are merged by name.

    A lock allows concurrent evaluations of the same checkpoint. The file is replaced atomically.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.with_name(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        merged = read_results(file)
        tasks = merged.get("tasks", {}) | results.get("tasks", {})
        merged |= results | {"tasks": tasks}
        with replacing(file) as temporary:
            temporary.write_text(json.dumps(merged, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def newest_results(run: Path) -> dict[str, Any]:
    """Return the results of the newest evaluated checkpoint of a run, or {} if there are none."""
    found = [(file.stem.removeprefix("step-"), file) for file in (run / FOLDER).glob("step-*.json")]
    files = [file for _, file in sorted((int(step), file) for step, file in found if step.isdecimal())]
    return read_results(files[-1]) if files else {}
