"""Resolves the patterns of a source to files and folders of raw documents, and reads them in batches.

Inputs are read in a defined order. Batches are still bytes, records or token ids: worker processes parse and tokenize
them, so that one reading process can supply many workers.
"""

import glob
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from data_prep import stdlib
from data_prep.errors import DataError
from data_prep.readers import (
    Columns,
    RawBatch,
    read_arrow,
    read_documents,
    read_json_lines,
    read_parquet,
    read_saved,
    read_text,
)
from data_prep.token_corpora import Boundaries, read_mds, read_megatron

JSON_LINES = (".jsonl", ".ndjson", ".json")
COMPRESSED = (".gz", ".zst", ".xz")
TEXT = (".txt", ".text", ".md", ".markdown", ".rst", ".tex", ".html", ".py", ".c", ".h", ".cpp", ".cu", ".rs", ".go")
BATCH_BYTES = 1 << 20


@dataclass(frozen=True)
class Input:
    """One file or folder to read. bytes: the sum of `consumed` over its batches."""

    kind: str  # stdlib, json, text, parquet, arrow, saved (a folder of `datasets`), megatron, mds
    path: str
    bytes: int
    files: int = 1

    @property
    def holds_tokens(self) -> bool:
        return self.kind in ("megatron", "mds")

    @property
    def has_columns(self) -> bool:
        """Whether its records have columns, by which `where` can filter."""
        return self.kind not in ("stdlib", "text") and not self.holds_tokens

    def read(
        self, columns: Columns, boundaries: Boundaries | None = None, batch_bytes: int = BATCH_BYTES
    ) -> Iterator[RawBatch]:
        """Yields the documents in batches of about `batch_bytes`. boundaries: required if the input holds tokens."""
        if self.kind == "stdlib":
            yield from read_documents(self.path, stdlib.documents(self.path), batch_bytes)
        elif self.holds_tokens:
            if boundaries is None:
                raise DataError(f"{self.path} holds tokens, not text")
            read_tokens = read_megatron if self.kind == "megatron" else read_mds
            yield from read_tokens(self.path, boundaries, batch_bytes)
        else:
            read = READERS[self.kind]
            yield from read(self.path, columns, batch_bytes)


READERS = {
    "json": read_json_lines,
    "text": read_text,
    "parquet": read_parquet,
    "arrow": read_arrow,
    "saved": read_saved,
}


def find_inputs(pattern: str) -> list[Input]:
    """Returns the inputs of a path, folder, glob or `stdlib:NAME`, sorted by path. Raises DataError for none."""
    if pattern.startswith(stdlib.SCHEME):
        files = stdlib.files(pattern)
        return [Input("stdlib", pattern, sum(map(len, stdlib.documents(pattern))), len(files))]
    if os.path.isdir(pattern):
        found = list(_walk(Path(pattern)))
    elif os.path.isfile(pattern):
        found = [_file(pattern, _kind(pattern) or "text")]
    elif os.path.isfile(pattern + ".idx"):  # a prefix, as Megatron uses
        found = [_file(pattern + ".idx", "megatron")]
    else:
        paths = [path for path in glob.glob(pattern, recursive=True) if _kind(path) != "megatron-data"]
        for path in paths:
            _check_link(path)
        found = [_file(path, _kind(path) or "text") for path in paths if os.path.isfile(path)]
        found += [folder for path in paths if os.path.isdir(path) and (folder := _whole_folder(Path(path)))]
    if not found:
        raise DataError(f"no input at {pattern}: not a file, not a folder with text files, and no file matches it")
    return sorted(found, key=lambda found: found.path)


def _walk(folder: Path, above: tuple[Path, ...] = ()) -> Iterator[Input]:
    here = folder.resolve()
    if here in above:
        raise DataError(f"{folder} is a link to a folder that holds it: remove it, or name the folders to read")
    whole = _whole_folder(folder)
    if whole:
        yield whole
        return
    for path in folder.iterdir():
        if path.is_dir():
            yield from _walk(path, (*above, here))
        elif (kind := _kind(path.name)) and kind != "megatron-data":
            _check_link(str(path))
            if path.is_file():
                yield _file(str(path), kind)


def _check_link(path: str) -> None:
    """Raises DataError for a symbolic link to nothing. Skipped like a file of another kind, its text would be missed."""
    if os.path.islink(path) and not os.path.exists(path):
        raise DataError(f"{path} is a link to {os.readlink(path)}, which cannot be read: mend or remove the link")


def _whole_folder(folder: Path) -> Input | None:
    """Returns the input for a folder that is a data set of another program, or None."""
    if (folder / "dataset_dict.json").is_file():
        raise DataError(f"{folder} holds the splits of a data set: name the folder of one of them")
    for kind, marker, suffix in (("saved", "state.json", "*.arrow"), ("mds", "index.json", "*.mds*")):
        if (folder / marker).is_file() and (kind == "mds" or (folder / "dataset_info.json").is_file()):
            files = list(folder.glob(suffix))
            return Input(kind, str(folder), sum(file.stat().st_size for file in files), len(files))
    return None


def _file(path: str, kind: str) -> Input:
    if kind == "megatron-data":
        path, kind = path.removesuffix(".bin") + ".idx", "megatron"
    if kind == "megatron":
        data = path.removesuffix(".idx") + ".bin"
        for file in (path, data):
            if not os.path.isfile(file):
                raise DataError(f"{file} is missing: Megatron's corpora are pairs of .bin and .idx")
        return Input(kind, path, os.path.getsize(data), 2)
    return Input(kind, path, os.path.getsize(path))


def _kind(path: str) -> str | None:
    """Returns the kind of content that a file name indicates, or None if the file does not count as text."""
    name = path.lower()
    if name.endswith((".parquet", ".arrow")):
        return name.rpartition(".")[2]
    if path.endswith(".idx"):
        return "megatron"
    if path.endswith(".bin") and os.path.isfile(path.removesuffix(".bin") + ".idx"):
        return "megatron-data"
    for suffix in COMPRESSED:
        name = name.removesuffix(suffix)
    if name.endswith(JSON_LINES):
        return "json"
    return "text" if name.endswith(TEXT) else None
