"""What tests do with checkpoints: list a run's, and give one checksums that fit its files."""

import json
import os
from pathlib import Path

from ssscale.train.files import checksum


def sign(checkpoint: Path) -> None:
    """Checksums that fit the files: a stranger can write them too."""
    files = [file for file in checkpoint.iterdir() if file.name != "checksums.json"]
    entries = {file.name: {"bytes": file.stat().st_size, "xxh3": checksum(file)} for file in files}
    (checkpoint / "checksums.json").write_text(json.dumps(entries))


def names(run: Path) -> list[str]:
    return sorted(os.listdir(run / "checkpoints"))
