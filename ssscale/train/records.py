"""metrics.jsonl: one JSON record per line."""

import json
import os
from pathlib import Path
from typing import Any


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The records of a metrics file; a last line that a crash cut short is left out."""
    records = []
    if path.is_file():
        for line in path.read_text().splitlines():
            try:
                records.append(json.loads(line))
            except ValueError:
                break
    return records


def keep_until(path: Path, step: int) -> None:
    """Drop the records after a step: the run resumes there and will write them again, each once."""
    kept = [record for record in read_metrics(path) if record["step"] <= step]
    temporary = path.with_name(path.name + ".tmp")
    with open(temporary, "w") as file:
        file.writelines(json.dumps(record) + "\n" for record in kept)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
