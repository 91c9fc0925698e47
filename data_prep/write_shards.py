"""The one place that writes the data folder: MDS shards of packed rows, and the manifest that makes the folder whole.

docs/data.md describes the format. The folder is built as FOLDER.partial and renamed at the end.
"""

import fcntl
import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np

from data_prep._torchvision import install_stand_in
from data_prep.errors import DataError
from data_prep.pack import Row

FORMAT = "ssscale-packed"
VERSION = 1
MANIFEST = "manifest.json"
TOKENIZER = "tokenizer.json"
COMPRESSION = "zstd:3"
HASHES = ["sha1", "xxh64"]  # streaming wants them sorted
LOCK = ".lock"


def columns(dtype: str) -> dict[str, str]:
    """The columns of a sample, which is one row, as MDS encodings."""
    return {
        "tokens": f"ndarray:{dtype}",
        "lengths": "ndarray:int32",
        "documents": "ndarray:int64",
        "offsets": "ndarray:int64",
    }


class ShardFolder:
    """A data folder in the making. Use as a context manager; only `commit` makes it exist under its name."""

    def __init__(self, out: str, dtype: str, shard_bytes: int):
        self.out = Path(out)
        self.partial = self.out.with_name(self.out.name + ".partial")
        self.dtype = dtype
        self.shard_bytes = shard_bytes
        self._writers: dict[tuple[str, str], Any] = {}

    def __enter__(self) -> "ShardFolder":
        check_free(self.out)
        try:
            self.partial.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise DataError(f"cannot make the output folder {self.partial}: {error.strerror}") from error
        strangers = [path.name for path in self.partial.iterdir()]
        if strangers and LOCK not in strangers:
            raise DataError(f"{self.partial} holds something else ({sorted(strangers)[0]}): move it away")
        self._lock = open(self.partial / LOCK, "w")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise DataError(f"another process is writing {self.partial}") from error
        for path in self.partial.iterdir():  # what a killed run left
            if path.is_dir():
                shutil.rmtree(path)
            elif path.name != LOCK:
                path.unlink()
        return self

    def __exit__(self, *exception: object) -> None:
        for writer in self._writers.values():
            writer.executor.shutdown(wait=False)
        self._lock.close()

    def write(self, split: str, source: str, row: Row) -> None:
        """Append a row to train/<source> or valid/<source>."""
        sample = {
            "tokens": np.concatenate([part.tokens for part in row]).astype(self.dtype, copy=False),
            "lengths": np.array([len(part.tokens) for part in row], np.int32),
            "documents": np.array([part.document for part in row], np.int64),
            "offsets": np.array([part.offset for part in row], np.int64),
        }
        self._writer(split, source).write(sample)

    def _writer(self, split: str, source: str) -> Any:
        if (split, source) not in self._writers:
            install_stand_in()
            from streaming import MDSWriter

            self._writers[split, source] = MDSWriter(
                columns=columns(self.dtype),
                out=str(self.partial / split / source),
                compression=COMPRESSION,
                hashes=HASHES,
                size_limit=self.shard_bytes,
            )
        return self._writers[split, source]

    def commit(self, tokenizer: str, manifest: dict[str, Any]) -> dict[str, Any]:
        """Close the shards, add the tokenizer and the manifest, and give the folder its name."""
        for writer in self._writers.values():
            writer.finish()
        shutil.copyfile(tokenizer, self.partial / TOKENIZER)
        files = sorted(path for path in self.partial.rglob("*") if path.is_file() and path.name != LOCK)
        manifest = {"format": FORMAT, "version": VERSION, **manifest, "files": {}}
        for path in files:
            name = path.relative_to(self.partial).as_posix()
            manifest["files"][name] = {"bytes": path.stat().st_size, "sha256": file_sha256(path)}
            _sync(path)
        manifest["checksum"] = checksum(manifest)
        temporary = self.partial / (MANIFEST + ".tmp")
        temporary.write_text(json.dumps(manifest, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        _sync(temporary)
        temporary.rename(self.partial / MANIFEST)
        for folder in [self.partial, *(path for path in self.partial.rglob("*") if path.is_dir())]:
            _sync(folder)
        self.partial.rename(self.out)
        # Not before: a run killed in between must find its own folder again.
        (self.out / LOCK).unlink()
        _sync(self.out.parent)
        return manifest


def check_free(out: Path) -> None:
    """Raises DataError unless `out` is absent or an empty folder."""
    if out.is_dir():
        names = sorted(path.name for path in out.iterdir())
        if MANIFEST in names:
            raise DataError(f"{out} already holds a data set: choose another --out or remove it")
        if names:
            raise DataError(f"{out} holds something else ({names[0]}): choose another --out")
    elif out.exists():
        raise DataError(f"{out} is a file: choose another --out")


def checksum(manifest: dict[str, Any]) -> str:
    """sha256 of the manifest without its `checksum`, as JSON with sorted keys, no spaces, ASCII."""
    content = {key: value for key, value in manifest.items() if key != "checksum"}
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def file_sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
