"""Reading of data folders for `verify`, `stats` and `show`. Every byte is checked, nothing is written."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from data_prep import mds
from data_prep.errors import DataError
from data_prep.mds import Sample
from data_prep.names import bad_name, bad_shard_name
from data_prep.write_shards import FORMAT, MANIFEST, VERSION, checksum


def read_manifest(folder: str) -> dict[str, Any]:
    """Returns the manifest of a data folder. Raises DataError if it is missing or broken, also by its checksum."""
    path = Path(folder) / MANIFEST
    if not path.is_file():
        partial = Path(folder + ".partial").is_dir()
        raise DataError(f"{folder} has no {MANIFEST}" + (": its preparation has not finished" if partial else ""))
    try:
        manifest = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path} is broken: {error}") from error
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise DataError(f"{path} is not a manifest of packed rows (its format is not {FORMAT!r})")
    if manifest.get("version") != VERSION:
        raise DataError(f"{path} has format version {manifest.get('version')}, this program reads {VERSION}")
    if manifest.get("checksum") != checksum(manifest):
        raise DataError(f"{path} is broken: its checksum does not match")
    try:
        found = bad_name(manifest)
    except (AttributeError, KeyError, TypeError) as error:
        raise DataError(f"{path} does not have the form of a manifest: {error!r}") from error
    if found is not None:
        raise DataError(f"{path} is not to be trusted: {found}, which is not the name of a file in its folder")
    return manifest


def shards(folder: str, split: str, source: str) -> list[dict[str, Any]]:
    """Returns the entries of the shards in index.json, in order. Raises DataError if the index is missing or broken."""
    path = Path(folder) / split / source / "index.json"
    try:
        found: list[dict[str, Any]] = json.loads(path.read_bytes())["shards"]
        bad = bad_shard_name(found)
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise DataError(f"{path} is missing or broken: {error}") from error
    if bad is not None:
        raise DataError(f"{path} is not to be trusted: {bad}, which is not the name of a file in its folder")
    return found


def read_shard(folder: str, split: str, source: str, shard: dict[str, Any]) -> Iterator[Sample]:
    """Yields the rows of a shard. Raises DataError naming the shard if it cannot be decoded."""
    return mds.read_shard(Path(folder) / split / source, shard)
