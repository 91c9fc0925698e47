"""Data folders as `verify`, `stats` and `show` see them: every byte checked, nothing written."""

import json
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import zstandard

from data_prep._torchvision import install_stand_in
from data_prep.errors import DataError
from data_prep.write_shards import FORMAT, MANIFEST, VERSION, checksum

Sample = dict[str, np.ndarray]


def read_manifest(folder: str) -> dict[str, Any]:
    """The manifest, checked against its own checksum."""
    path = Path(folder) / MANIFEST
    if not path.is_file():
        partial = Path(folder + ".partial").is_dir()
        raise DataError(f"{folder} has no {MANIFEST}" + (": its preparation has not ended" if partial else ""))
    try:
        manifest = json.loads(path.read_bytes())
    except ValueError as error:
        raise DataError(f"{path} is broken: {error}") from error
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise DataError(f"{path} is not a manifest of packed rows (its format is not {FORMAT!r})")
    if manifest.get("version") != VERSION:
        raise DataError(f"{path} has format version {manifest.get('version')}, this program reads {VERSION}")
    if manifest.get("checksum") != checksum(manifest):
        raise DataError(f"{path} is broken: its checksum does not match")
    return manifest


def shards(folder: str, split: str, source: str) -> list[dict[str, Any]]:
    """The shards' entries in index.json, in order."""
    path = Path(folder) / split / source / "index.json"
    try:
        return json.loads(path.read_bytes())["shards"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path} is missing or broken: {error}") from error


def read_shard(folder: str, split: str, source: str, shard: dict[str, Any]) -> Iterator[Sample]:
    """The rows of a shard. Raises DataError naming the shard if it cannot be decoded."""
    install_stand_in()
    from streaming.base.format.mds.reader import MDSReader

    path = Path(folder) / split / source / shard["zip_data"]["basename"]
    try:
        raw = zstandard.ZstdDecompressor().decompress(path.read_bytes(), max_output_size=shard["raw_data"]["bytes"])
        reader = MDSReader.from_json(str(path.parent), "", shard)
        reader.validate(allow_unsafe_types=False)
        number = int(np.frombuffer(raw[:4], np.uint32)[0])
        bounds = np.frombuffer(raw[4 : 4 * (number + 2)], np.uint32)
        if number != shard["samples"]:
            raise ValueError(f"{number} rows, {shard['samples']} in the index")
        for start, end in pairwise(bounds.tolist()):
            yield reader.decode_sample(raw[start:end])
    except (OSError, ValueError, KeyError, IndexError, TypeError, zstandard.ZstdError) as error:
        raise DataError(f"shard {path} cannot be read: {error}") from error
