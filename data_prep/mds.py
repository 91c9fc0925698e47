"""Reads samples from MDS shards (mosaicml-streaming), one shard at a time, and checks every hash."""

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from data_prep.errors import DataError
from ssscale.data.streaming_patches import import_streaming

Sample = dict[str, Any]


def read_shard(folder: Path, shard: dict[str, Any]) -> Iterator[Sample]:
    """Yields the samples of a shard, given its entry in index.json. Raises DataError naming a damaged shard."""
    path = folder / (shard["zip_data"] or shard["raw_data"])["basename"]
    try:
        raw, reader = _open(folder, shard)
        number = int(np.frombuffer(raw[:4], np.uint32)[0])
        bounds = np.frombuffer(raw[4 : 4 * (number + 2)], np.uint32)
        if number != shard["samples"]:
            raise ValueError(f"{number} rows, {shard['samples']} in the index")
        for start, end in pairwise(bounds.tolist()):
            yield reader.decode_sample(raw[start:end])
    except (OSError, ValueError, KeyError, IndexError, TypeError) as error:
        raise DataError(f"shard {path} cannot be read: {error}") from error


def _open(folder: Path, shard: dict[str, Any]) -> tuple[bytes, Any]:
    import_streaming()
    from streaming.base.compression import decompress
    from streaming.base.format.mds.reader import MDSReader
    from streaming.base.hashing import get_hash

    reader = MDSReader.from_json(str(folder), "", shard)
    reader.validate(allow_unsafe_types=False)
    info = shard["zip_data"] or shard["raw_data"]
    data = (folder / info["basename"]).read_bytes()
    for name, expected in info["hashes"].items():
        if get_hash(name, data) != expected:
            raise ValueError(f"its {name} is not the index's")
    if shard["zip_data"]:
        try:
            data = decompress(shard["compression"], data)
        except Exception as error:  # each compression library raises its own exceptions
            raise ValueError(str(error)) from error
    if len(data) != shard["raw_data"]["bytes"]:
        raise ValueError(f"{len(data):,} bytes, {shard['raw_data']['bytes']:,} in the index")
    return data, reader
