"""Finds and reads the result files for figures. Errors name the command that makes a missing file."""

from pathlib import Path
from typing import Any

from ssscale.errors import UserError
from ssscale.json_object import read_json

# kind of results → the command that makes them
COMMANDS = {
    "long_context": "python -m eval.papers.long_context RUN --texts FILE.jsonl",
    "repeats": "python -m eval.papers.repeats RUN --texts FILE.jsonl",
    "articles": "python -m eval.papers.long_context RUN --texts FILE.jsonl --articles",
    "needle": "python -m eval.papers.needle RUN --texts FILE.jsonl",
    "needle_scores": "python -m eval.papers.needle RUN --texts FILE.jsonl --scores",
}


def of_runs(paths: list[Path], kind: str) -> list[dict[str, Any]]:
    """Read the results of a kind from run folders and files.

    A run folder gives the newest result of each of its evaluations, the one without changed keys first. Raises UserError
    for missing or wrong results.
    """
    command = COMMANDS[kind]
    if not paths:
        raise UserError(f"no run is given; give run folders, or files that `{command}` has made")
    results = []
    for path in paths:
        files = [path] if path.is_file() else _newest(path, kind)
        if not files:
            raise UserError(f"{path} has no {kind.replace('_', ' ')} results: make them with `{command}`")
        for file in files:
            found = read_json(file)
            if found.get("kind") != kind:
                raise UserError(f"{file} is not what `{command}` makes")
            results.append(found)
    return results


def _newest(run: Path, kind: str) -> list[Path]:
    files: dict[Path, Path] = {}
    for file in sorted((run / "eval").rglob(f"{kind}-step-*.json")):
        files[file.parent] = file
    return sorted(files.values(), key=lambda file: (file.parent != run / "eval", file))


def of_mqrar(folder: Path, pattern: str, command: str) -> list[dict[str, Any]]:
    """Read the MQRAR results that match a glob pattern. Raises UserError, which names `command`, if there are none."""
    files = sorted(folder.glob(pattern))
    if not files:
        raise UserError(f"{folder} has no {pattern}: make them with `{command}`")
    return [read_json(file) for file in files]


def label(result: dict[str, Any]) -> str:
    """Return the name of the run and the keys that its evaluation changed."""
    changes = [change.removeprefix("model.").removeprefix("position.") for change in result["changes"]]
    return result["run"] + (f" ({', '.join(changes)})" if changes else "")
