"""The manifest of a data folder (docs/data.md): read, checked against its checksum, and reduced to a fingerprint."""

import hashlib
import json
from pathlib import Path
from typing import Any

from ssscale.errors import UserError

FORMAT = "ssscale-packed"
VERSION = 1
NAME = "manifest.json"


def read(file: Path) -> dict[str, Any]:
    """Raises UserError if the file is broken or of another format."""
    try:
        manifest = json.loads(file.read_bytes())
    except (OSError, ValueError) as error:
        raise UserError(f"{file} is broken: {error}") from error
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise UserError(f"{file} is not the manifest of a data folder (its format is not {FORMAT!r})")
    if manifest.get("version") != VERSION:
        raise UserError(f"{file} has format version {manifest.get('version')}, this program reads {VERSION}")
    content = {key: value for key, value in manifest.items() if key != "checksum"}
    if _sha256(content) != manifest.get("checksum"):
        raise UserError(f"{file} is corrupt: its checksum does not match")
    return manifest


def fingerprint(manifest: dict[str, Any]) -> str:
    """What decides the rows of a data set: the tokenizer, the length and the shards, not where they came from."""
    shards = {
        name: entry["sha256"] for name, entry in manifest["files"].items() if name != manifest["tokenizer"]["file"]
    }
    return _sha256({"tokenizer": manifest["tokenizer"], "length": manifest["length"], "shards": shards})


def _sha256(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
