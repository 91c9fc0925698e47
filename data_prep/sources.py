"""Raw documents from files: JSON lines (plain, gz, zst, xz) and trees of text files, in a stated order.

What a reader yields is still bytes: workers parse and tokenize it, so that one reading process feeds many.
"""

import glob
import gzip
import io
import lzma
import os
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, cast

import zstandard

from data_prep import stdlib
from data_prep.errors import DataError

JSON_LINES = (".jsonl", ".ndjson", ".json")
COMPRESSED = (".gz", ".zst", ".xz")
TEXT = (".txt", ".text", ".md", ".markdown", ".rst", ".tex", ".html", ".py", ".c", ".h", ".cpp", ".cu", ".rs", ".go")
BATCH_BYTES = 1 << 20


@dataclass(frozen=True)
class RawBatch:
    """Documents of one file, in order. `consumed` counts the bytes of the file read for them, for the progress bar."""

    file: str
    first_line: int  # of a JSON-lines file, counted from 1; 0 where a document is the whole file
    payloads: list[bytes]
    consumed: int


def input_files(pattern: str) -> list[str]:
    """The files behind a path, a folder, a glob or `stdlib:NAME`, sorted. Raises DataError if there is none."""
    if pattern.startswith(stdlib.SCHEME):
        return stdlib.files(pattern)
    if os.path.isfile(pattern):
        files = [pattern]
    elif os.path.isdir(pattern):
        files = sorted(str(p) for p in Path(pattern).rglob("*") if p.is_file() and readable(p.name))
    else:
        files = sorted(f for f in glob.glob(pattern, recursive=True) if os.path.isfile(f))
    if not files:
        raise DataError(f"no input at {pattern}: not a file, not a folder with text files, and no file matches it")
    return files


def bytes_to_read(patterns: list[str]) -> int:
    """What the batches' `consumed` will add up to."""
    total = 0
    for pattern in patterns:
        if pattern.startswith(stdlib.SCHEME):
            total += sum(map(len, stdlib.documents(pattern)))
        else:
            total += sum(os.path.getsize(file) for file in input_files(pattern))
    return total


def readable(name: str) -> bool:
    """Whether a file found in a folder counts as text."""
    return is_json_lines(name) or name.endswith(TEXT)


def is_json_lines(name: str) -> bool:
    for suffix in COMPRESSED:
        name = name.removesuffix(suffix)
    return name.endswith(JSON_LINES)


def read_batches(pattern: str, batch_bytes: int = BATCH_BYTES) -> Iterator[RawBatch]:
    """The documents behind a source pattern, in batches of about `batch_bytes` of text."""
    if pattern.startswith(stdlib.SCHEME):
        yield from _read_documents(pattern, stdlib.documents(pattern), batch_bytes)
        return
    for file in input_files(pattern):
        if is_json_lines(file):
            yield from _read_json_lines(file, batch_bytes)
        else:
            with _opened(file) as (stream, raw):
                data = stream.read()
                yield RawBatch(file, 0, [data], raw.tell())


def _read_documents(name: str, documents: Iterable[bytes], batch_bytes: int) -> Iterator[RawBatch]:
    payloads: list[bytes] = []
    size = 0
    for document in documents:
        payloads.append(document)
        size += len(document)
        if size >= batch_bytes:
            yield RawBatch(name, 0, payloads, size)
            payloads, size = [], 0
    if payloads:
        yield RawBatch(name, 0, payloads, size)


def _read_json_lines(file: str, batch_bytes: int) -> Iterator[RawBatch]:
    lines: list[bytes] = []
    first, size, seen = 1, 0, 0
    with _opened(file) as (stream, raw):
        for number, line in enumerate(stream, start=1):
            lines.append(line)
            size += len(line)
            if size >= batch_bytes:
                yield RawBatch(file, first, lines, raw.tell() - seen)
                lines, first, size, seen = [], number + 1, 0, raw.tell()
        if lines:
            yield RawBatch(file, first, lines, raw.tell() - seen)


@contextmanager
def _opened(file: str) -> Iterator[tuple[IO[bytes], IO[bytes]]]:
    """A file's decompressed stream and the raw file under it."""
    try:
        raw = open(file, "rb")  # noqa: SIM115 (closed below)
    except OSError as error:
        raise DataError(f"cannot read {file}: {error.strerror}") from error
    with raw:
        try:
            yield _decompressed(file, raw), raw
        except (zstandard.ZstdError, lzma.LZMAError, zlib.error, EOFError, gzip.BadGzipFile) as error:
            raise DataError(f"{file} is broken or cut off: {error}") from error


def _decompressed(file: str, raw: IO[bytes]) -> IO[bytes]:
    if file.endswith(".gz"):
        return cast(IO[bytes], gzip.GzipFile(fileobj=raw))
    if file.endswith(".xz"):
        return cast(IO[bytes], lzma.LZMAFile(raw))
    if file.endswith(".zst"):
        # 2 GiB: the window of `zstd --long=31`.
        reader = zstandard.ZstdDecompressor(max_window_size=2**31).stream_reader(raw, read_across_frames=True)
        return io.BufferedReader(reader, buffer_size=1 << 20)
    return raw
