"""Writing of data folders: MDS shards of packed rows, and the manifest that completes the folder.

docs/reference/data_format.md describes the format. The folder is built as FOLDER.partial and renamed at the end.
FOLDER.partial also holds what `resume.py` needs to continue after a kill.
"""

import fcntl
import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from data_prep.errors import DataError
from data_prep.pack import Row
from ssscale.data.streaming_patches import import_streaming

FORMAT = "ssscale-packed"
VERSION = 1
MANIFEST = "manifest.json"
TOKENIZER = "tokenizer.json"
INDEX = "index.json"
COMPRESSION = "zstd:3"
HASHES = ["sha1", "xxh64"]  # streaming requires sorted names
LOCK = ".lock"
SCRATCH = (LOCK, ".state", ".keys")  # files of FOLDER.partial that are not part of the data

Unfinished = tuple[list[dict[str, Any]], list[bytes]]  # of a writer: entries of its shards, and samples of the next


def columns(dtype: str) -> dict[str, str]:
    """Returns the columns of a sample, which is one row, as MDS encodings."""
    return {
        "tokens": f"ndarray:{dtype}",
        "lengths": "ndarray:int32",
        "documents": "ndarray:int64",
        "offsets": "ndarray:int64",
    }


class ShardFolder:
    """A data folder that is being written, as a context manager. Only `commit` gives the folder its final name.

    Sources are written in sequence: `begin`, rows, `end`. The content of FOLDER.partial is kept until `clear`, so that
    a run can continue with it.
    """

    def __init__(self, out: str, shard_bytes: int):
        self.out = Path(out)
        self.partial = self.out.with_name(self.out.name + ".partial")
        self.shard_bytes = shard_bytes
        self.source, self.dtype = "", ""
        self._writers: dict[str, Any] = {}
        self._synced: dict[str, int] = {}  # number of shards of each split that are synced to disk
        self._lock: TextIO | None = None

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
        return self

    def __exit__(self, *exception: object) -> None:
        if self._lock is not None:
            self._lock.close()

    def clear(self) -> None:
        """Removes the files of a killed run."""
        for path in self.partial.iterdir():
            if path.is_dir():
                shutil.rmtree(path)
            elif path.name != LOCK:
                path.unlink()

    def begin(self, source: str, dtype: str, unfinished: dict[str, Unfinished] | None = None) -> None:
        """Starts a source, or continues one with the result of `unfinished()`."""
        self.source, self.dtype = source, dtype
        self._writers = {}
        self._synced = {}
        for split, (shards, samples) in (unfinished or {}).items():
            writer = self._writer(split)
            writer.shards, writer.new_samples = shards, samples
            writer.new_shard_size += sum(len(sample) + writer.extra_bytes_per_sample for sample in samples)

    def write(self, split: str, row: Row) -> None:
        """Appends a row to train/<source> or valid/<source>."""
        sample = {
            "tokens": np.concatenate([part.tokens for part in row]).astype(self.dtype, copy=False),
            "lengths": np.array([len(part.tokens) for part in row], np.int32),
            "documents": np.array([part.document for part in row], np.int64),
            "offsets": np.array([part.offset for part in row], np.int64),
        }
        self._writer(split).write(sample)

    def unfinished(self) -> dict[str, Unfinished]:
        """Returns the state that is needed to continue the source, by split. Its finished shards are synced to disk."""
        for split, writer in self._writers.items():
            for shard in writer.shards[self._synced.get(split, 0) :]:
                sync(Path(writer.local) / shard["zip_data"]["basename"])
            self._synced[split] = len(writer.shards)
        return {split: (writer.shards, writer.new_samples) for split, writer in self._writers.items()}

    def end(self) -> None:
        """Closes the shards of the source."""
        for writer in self._writers.values():
            writer.finish()
        self._writers = {}

    def _writer(self, split: str) -> Any:
        if split not in self._writers:
            import_streaming()
            from streaming import MDSWriter

            # MDSWriter requires an empty folder. The source's folder is not empty when a run continues.
            new = self.partial / ".new"
            self._writers[split] = MDSWriter(
                columns=columns(self.dtype),
                out=str(new),
                compression=COMPRESSION,
                hashes=HASHES,
                size_limit=self.shard_bytes,
            )
            new.rmdir()
            folder = self.partial / split / self.source
            folder.mkdir(parents=True, exist_ok=True)
            self._writers[split].local = str(folder)
        return self._writers[split]

    def commit(self, manifest: dict[str, Any], known: dict[str, str] | None = None) -> dict[str, Any]:
        """Adds the manifest and renames the folder to its final name. known: sha256 of files that need not be read."""
        files = sorted(path for path in self.partial.rglob("*") if path.is_file() and path.name not in SCRATCH)
        manifest = {"format": FORMAT, "version": VERSION, **manifest, "files": {}}
        for path in files:
            name = path.relative_to(self.partial).as_posix()
            if name.startswith(MANIFEST):  # left by a run that was killed here
                continue
            digest = (known or {}).get(name) or file_sha256(path)
            manifest["files"][name] = {"bytes": path.stat().st_size, "sha256": digest}
            sync(path)
        manifest["checksum"] = checksum(manifest)
        write_whole(
            self.partial / MANIFEST, (json.dumps(manifest, indent=1, ensure_ascii=False) + "\n").encode("utf-8")
        )
        for folder in [self.partial, *(path for path in self.partial.rglob("*") if path.is_dir())]:
            sync(folder)
        self.partial.rename(self.out)
        # Only after the rename: a run that is killed in between must recognise its own folder.
        remove_scratch(self.out)
        sync(self.out.parent)
        return manifest


def check_free(out: Path) -> None:
    """Raises DataError unless `out` does not exist or is an empty folder."""
    if out.is_dir():
        names = sorted(path.name for path in out.iterdir())
        if MANIFEST in names:
            raise DataError(f"{out} already holds a data set: choose another --out or remove it")
        if names:
            raise DataError(f"{out} holds something else ({names[0]}): choose another --out")
    elif out.exists():
        raise DataError(f"{out} is a file: choose another --out")
    if not out.name:  # FOLDER.partial is made beside it
        raise DataError(f"--out {out} is not the name of a folder to be made: choose another --out")


def remove_scratch(folder: Path) -> None:
    """Removes files that remain in a complete folder if a run was killed at its very end."""
    for name in SCRATCH:
        (folder / name).unlink(missing_ok=True)


def checksum(manifest: dict[str, Any]) -> str:
    """Returns the sha256 of the manifest without its `checksum`, as JSON with sorted keys, no spaces, in ASCII."""
    content = {key: value for key, value in manifest.items() if key != "checksum"}
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def file_sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_whole(path: Path, content: bytes) -> None:
    """Writes a file so that it exists with all of its content or not at all."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_bytes(content)
    sync(temporary)
    temporary.rename(path)


def sync(path: Path) -> None:
    """Flushes a file, or the entries of a folder, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
