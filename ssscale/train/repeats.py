"""Counts the starts of a run that end in the same way at the same step, so that Slurm does not restart it forever."""

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

# How many times the same may happen at the same step: an error that all ranks report, or what may be an accident: a rank
# that leaves without a report, a hang, an error of a GPU, a killed worker of the data loader.
SAME_ERROR, SAME_LOSS = 2, 4


def times(folder: Path, rank: int, same: list[Any]) -> int:
    """Returns how many starts in a row, including this one, have ended in the same way on this rank. Counts this one.

    folder: `stacks` in the run folder. same: what has happened, beginning with the step, as values of JSON.
    """
    file = folder / f"lost-rank-{rank:05d}.json"
    before: Any = read_json(file)
    found = 1
    with suppress(KeyError, TypeError, ValueError):
        found += int(before["times"]) if before["same"] == json.loads(json.dumps(same)) else 0
    write_json(file, {"same": same, "times": found})
    return found


def advice(count: int, folder: Path) -> str:
    """Returns the end of the sentence with which a run ends that is not started again."""
    return (
        f"the same has happened {count} times at this step, so starting again will not help: see the reports in {folder}, "
        "and remove that folder to try again"
    )


def read_json(file: Path) -> Any:
    try:
        return json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError):
        return None


def write_json(file: Path, content: dict[str, Any]) -> None:
    """Writes a report. Errors of the disk are ignored; the other ranks then take this rank for gone."""
    with suppress(OSError):
        file.parent.mkdir(exist_ok=True)
        temporary = file.with_suffix(".tmp")
        temporary.write_text(json.dumps(content))
        os.replace(temporary, file)
