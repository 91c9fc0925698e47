"""The runs and the changed keys that a command of this folder takes. Imports no torch."""

from pathlib import Path
from typing import Any

from eval.checkpoint.documents import sha256_of
from eval.checkpoint.results import check_keys, run_folder
from ssscale.errors import UserError
from ssscale.train.checkpoint_folder import find_checkpoint

CHANGEABLE = ("model.mixers", "model.mixer.", "model.position.")


def runs_and_changes(texts: list[str]) -> tuple[list[Path], list[str]]:
    """Return the runs and the changed keys among the arguments. Raises UserError before any run is evaluated."""
    changes = [text for text in texts if text.startswith(CHANGEABLE)]
    runs = [Path(text) for text in texts if text not in changes]
    for run in runs:
        if "=" in str(run) and not run.exists():
            raise UserError(f"{run}: there is no such folder, and keys to change begin with {', '.join(CHANGEABLE)}")
        find_checkpoint(run, "RUN", quiet=True)  # `reading` reports damage
    if not runs:
        raise UserError("no run is given: name a run or a checkpoint beside the keys to change")
    check_keys(changes)
    return runs, changes


def described(kind: str, checkpoint: Path, changes: list[str], texts: Path) -> dict[str, Any]:
    """Return the settings that every result names: what was evaluated, and on which texts."""
    return {
        "kind": kind,
        "run": run_folder(checkpoint).resolve().name,
        "checkpoint": checkpoint.name,
        "changes": changes,
        "texts": texts.name,
        "texts_sha256": sha256_of(texts),
    }
