"""Reads files that hold one JSON object."""

import json
from pathlib import Path
from typing import Any

from ssscale.errors import UserError


def read_json(file: Path) -> dict[str, Any]:
    """Returns the JSON object in a file. Raises UserError if the file cannot be read or holds something else."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{file} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise UserError(f"{file} does not hold a JSON object")
    return content
