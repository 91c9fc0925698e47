"""Reads metrics.jsonl, which has one JSON record per line, and cuts it back to a step."""

import json
import logging
import os
from collections import Counter
from pathlib import Path
from typing import Any

from ssscale.train.files import move_folder_aside, write_file

logger = logging.getLogger("ssscale")


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Returns the records of a metrics file, without damaged lines and without a last line that a crash cut short."""
    data = path.read_bytes() if path.is_file() else b""
    return [record for line in data.split(b"\n") if (record := _parse(line)) is not None]


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) and type(record.get("step")) is int else None


def keep_until(path: Path, step: int) -> None:
    """Removes the records after a step, because a run that resumes there writes them again.

    Damaged lines are moved to metrics.damaged.jsonl in the same folder: those that cannot be read, and all losses of a step
    that has more than one, because damage has changed the number of a step. If `path` is a folder, it is renamed.
    Raises OSError.
    """
    move_folder_aside(path)
    data = path.read_bytes() if path.is_file() else b""
    *lines, last = data.split(b"\n")
    records = [(line, _parse(line)) for line in lines if line.strip()]
    if _parse(last) is not None:
        records.append((last, _parse(last)))
    losses = Counter(record["step"] for _, record in records if record is not None and "loss" in record)
    twice = {at for at, count in losses.items() if count > 1}
    sound = [x is not None and not ("loss" in x and x["step"] in twice) for _, x in records]
    kept = b"".join(line + b"\n" for (line, x), whole in zip(records, sound) if whole and x and x["step"] <= step)
    damaged = [line for (line, _), whole in zip(records, sound) if not whole]
    if damaged:
        aside = path.with_name("metrics.damaged.jsonl")
        logger.warning("%s: %d lines are damaged and are moved to %s", path, len(damaged), aside.name)
        with open(aside, "ab") as file:
            file.writelines(line + b"\n" for line in damaged)
            file.flush()
            os.fsync(file.fileno())
    if data == kept:
        return
    if data.startswith(kept):  # the usual case; truncating needs no space on a full disk
        with open(path, "r+b") as file:
            file.truncate(len(kept))
            os.fsync(file.fileno())
    else:
        temporary = path.with_name(path.name + ".tmp")
        write_file(temporary, [memoryview(kept)])
        os.replace(temporary, path)
