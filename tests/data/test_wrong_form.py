"""Folders that data_prep has not written: what is wrong with them is named, with the file."""

import json
import os
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data_prep.write_shards import checksum
from ssscale.data import shards
from ssscale.data.batch import Row
from ssscale.data.stream import PackedData
from ssscale.errors import UserError

LENGTH = 8
WHOLE = Row(
    np.arange(LENGTH, dtype=np.uint16),
    np.array([3, 5], np.int32),
    np.array([0, 1], np.int64),
    np.zeros(2, np.int64),
)


@pytest.mark.parametrize(
    ("row", "said"),
    [
        (WHOLE, None),
        (WHOLE._replace(tokens=np.arange(9, dtype=np.uint16)), "has 9 tokens, and rows have 8"),
        (WHOLE._replace(lengths=np.array([3, 4], np.int32)), "is divided into parts of [3, 4] tokens"),
        (WHOLE._replace(lengths=np.array([8, 0], np.int32)), "is divided into parts of [8, 0] tokens"),
        (WHOLE._replace(lengths=np.array([9, -1], np.int32)), "is divided into parts of [9, -1] tokens"),
        (WHOLE._replace(lengths=np.array([8], np.int32)), "has other numbers of lengths, documents and offsets"),
        (WHOLE._replace(tokens=np.full(8, 9, np.uint16)), "has token id 9, and its tokenizer has 9 entries"),
        (Row(WHOLE.tokens, *(np.zeros(0, np.int64) for _ in range(3))), "is divided into parts of [] tokens"),
    ],
)
def test_a_row_is_checked(row: Row, said: str | None) -> None:
    store = object.__new__(shards.RowStore)
    store.length, store.vocab_size = LENGTH, 9
    found = store._mistake(row)
    assert found == said if said is None else str(found).startswith(said)


def test_the_shard_of_a_wrong_row_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = PackedData.open(str(folder))
    monkeypatch.setattr(shards, "_decode", lambda *given: WHOLE)
    with pytest.raises(
        UserError, match=r"^shard .*/train/\w+/shard\.00000\.mds\.zstd: row 3 has 8 tokens, and rows have"
    ):
        data.row(0, 3)


def _first(change: Callable[[dict[str, Any]], object]) -> Callable[[dict[str, Any]], object]:
    return lambda index: change(index["shards"][0])


@pytest.mark.parametrize(
    "change",
    [
        _first(lambda shard: shard.update(version=1)),
        _first(lambda shard: shard.update(samples=-1)),
        _first(lambda shard: shard["raw_data"].update(bytes="many")),
        _first(lambda shard: shard["raw_data"].update(hashes={})),
        _first(lambda shard: shard.update(raw_data=None)),
    ],
)
def test_an_index_of_a_wrong_form_is_named(copy: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Its hash is right: another program may have written it."""
    name = "train/a/index.json"
    index = json.loads((copy / name).read_text())
    change(index)
    (copy / name).write_text(json.dumps(index))
    manifest = json.loads((copy / "manifest.json").read_text())
    manifest["files"][name]["sha256"] = sha256((copy / name).read_bytes()).hexdigest()
    manifest["checksum"] = checksum(manifest)
    (copy / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(UserError, match=r"train/a/index\.json does not have the form of an index"):
        PackedData.open(str(copy))


def test_a_pipe_in_place_of_an_index_is_not_waited_for(copy: Path) -> None:
    index = copy / "train/a/index.json"
    index.unlink()
    os.mkfifo(index)
    with pytest.raises(UserError, match=r"train/a/index\.json is missing"):
        PackedData.open(str(copy))


def test_a_folder_in_place_of_a_shard_is_named(copy: Path) -> None:
    file = next(copy.glob("train/a/shard.00000.mds.zstd"))
    file.with_suffix("").mkdir()
    with pytest.raises(UserError, match=r"shard .*/train/a/shard\.00000\.mds cannot be read: Is a directory"):
        PackedData.open(str(copy)).row("a", 0)


def test_a_full_disk_is_not_a_corrupt_shard(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = PackedData.open(str(copy))
    temporary = copy / "train/a/shard.00000.mds.tmp"

    def full(reader: object) -> None:
        temporary.touch()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(data.stores["a"]._stream, "prepare_shard", full)
    with pytest.raises(
        UserError, match=r"cannot be decompressed beside it \(No space left on device\): make room, or name"
    ):
        data.row("a", 0)
    assert not temporary.exists()
