"""Readers of raw documents: JSON lines and text files (plain, gz, zst, xz), Parquet, Arrow, `datasets` folders."""

import glob
import gzip
import io
import lzma
import os
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Any, cast

import zstandard

from data_prep.errors import DataError
from ssscale.data.zstd import decompressed

if TYPE_CHECKING:
    import pyarrow as pa

MAX_DOCUMENT = 1 << 26  # bytes; tokenization takes about 30 times as much memory

Columns = list[str]  # the column of the text, then those of filters


@dataclass(frozen=True)
class RawBatch:
    """Unparsed documents of one file, in order: lines of JSON, whole texts, records, or token ids.

    first: the number of the first line, row or document, counted from 1; 0 if the document is the whole file.
    consumed: bytes of the input that were read for the batch, for the progress bar.
    """

    kind: str  # json: bytes; text: bytes; record: dict of columns; tokens: array of ids
    file: str
    first: int
    documents: list[Any]
    consumed: int

    def where(self, index: int) -> str:
        """Returns the location of a document, for messages."""
        unit = {"json": "line", "record": "row", "tokens": "document"}.get(self.kind)
        return f"{self.file} {unit} {self.first + index}" if self.first and unit else self.file


def read_documents(name: str, documents: Iterable[bytes], batch_bytes: int) -> Iterator[RawBatch]:
    """Yields batches of texts that have no file of their own."""
    batch: list[bytes] = []
    size = 0
    for document in documents:
        batch.append(document)
        size += len(document)
        if size >= batch_bytes:
            yield RawBatch("text", name, 0, batch, size)
            batch, size = [], 0
    if batch:
        yield RawBatch("text", name, 0, batch, size)


def read_text(file: str, columns: Columns, batch_bytes: int) -> Iterator[RawBatch]:
    """Reads a text file as one document. It is cut after MAX_DOCUMENT bytes; the parser then rejects it."""
    with _opened(file) as (stream, raw):
        document = stream.read(MAX_DOCUMENT + 1)
        yield RawBatch("text", file, 0, [document], raw.seek(0, io.SEEK_END))


def read_json_lines(file: str, columns: Columns, batch_bytes: int) -> Iterator[RawBatch]:
    """Reads one JSON record per line."""
    lines: list[bytes] = []
    first, size, seen = 1, 0, 0
    with _opened(file) as (stream, raw):
        number = 0
        while line := stream.readline(MAX_DOCUMENT + 1):
            number += 1
            lines.append(line)
            size += len(line)
            while len(line) > MAX_DOCUMENT and not line.endswith(b"\n"):  # the parser rejects it; skip its rest
                line = stream.readline(MAX_DOCUMENT + 1)
            if size >= batch_bytes:
                yield RawBatch("json", file, first, lines, raw.tell() - seen)
                lines, first, size, seen = [], number + 1, 0, raw.tell()
        if lines:
            yield RawBatch("json", file, first, lines, raw.tell() - seen)


def read_parquet(file: str, columns: Columns, batch_bytes: int) -> Iterator[RawBatch]:
    """Reads one record per row, a part of a row group at a time."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(file) as table:
            _check_columns(file, table.schema_arrow.names, columns)
            groups = [table.metadata.row_group(number) for number in range(table.metadata.num_row_groups)]
            size = sum(group.total_byte_size for group in groups)
            rows = max(1, table.metadata.num_rows * batch_bytes // max(size, 1))
            batches = table.iter_batches(batch_size=rows, columns=columns)
            yield from _records(file, batches, table.metadata.num_rows, columns)
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{file} is no whole Parquet file: {_first_line(error)}") from error


def read_arrow(file: str, columns: Columns, batch_bytes: int) -> Iterator[RawBatch]:
    """Reads an Arrow file or stream. It is memory-mapped, so that only the current part takes memory."""
    import pyarrow as pa

    try:
        with pa.memory_map(file) as memory:
            try:
                reader = pa.ipc.open_stream(memory)
            except pa.ArrowInvalid:
                memory.seek(0)
                reader = pa.ipc.open_file(memory)
            _check_columns(file, reader.schema.names, columns)
            if hasattr(reader, "num_record_batches"):
                batches = (reader.get_batch(number) for number in range(reader.num_record_batches))
            else:
                batches = iter(reader)
            yield from _records(file, _sliced(batches, columns, batch_bytes), None, columns)
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{file} is no whole Arrow file: {_first_line(error)}") from error


def read_saved(folder: str, columns: Columns, batch_bytes: int) -> Iterator[RawBatch]:
    """Reads a folder of `datasets.Dataset.save_to_disk` in its order, which may be shuffled or filtered."""
    import datasets
    import pyarrow as pa

    try:
        table = datasets.load_from_disk(folder).with_format("arrow")
    except (pa.ArrowException, OSError, ValueError, KeyError) as error:
        raise DataError(f"{folder} is no whole saved data set: {_first_line(error)}") from error
    _check_columns(folder, table.column_names, columns)
    rows = max(1, len(table) * batch_bytes // max(table.data.nbytes, 1))
    batches = (batch for chunk in table.select_columns(columns).iter(rows) for batch in chunk.to_batches())
    yield from _records(folder, batches, len(table), columns)


def _records(
    file: str, batches: "Iterable[pa.RecordBatch]", num_rows: int | None, columns: Columns
) -> Iterator[RawBatch]:
    import pyarrow as pa

    size = sum(os.path.getsize(path) for path in _data_files(file))
    done, row = 0, 0
    for batch in batches:
        if not batch.num_rows:
            continue
        values = {}
        for name in columns:
            column = batch.column(name)
            if pa.types.is_string(column.type) or pa.types.is_large_string(column.type):
                column = column.cast(pa.large_binary())  # the workers decode and report rows that are not UTF-8
            values[name] = column.to_pylist()
        records = [dict(zip(columns, row)) for row in zip(*values.values())]
        row += batch.num_rows
        consumed = size * row // num_rows - done if num_rows else min(batch.nbytes, size - done)
        done += consumed
        yield RawBatch("record", file, row - batch.num_rows + 1, records, consumed)


def _data_files(path: str) -> list[str]:
    return glob.glob(os.path.join(glob.escape(path), "*.arrow")) if os.path.isdir(path) else [path]


def _sliced(batches: "Iterable[pa.RecordBatch]", columns: Columns, batch_bytes: int) -> "Iterator[pa.RecordBatch]":
    for batch in batches:
        rows = max(1, batch.num_rows * batch_bytes // max(batch.nbytes, 1))
        for first in range(0, batch.num_rows, rows):
            yield batch.select(columns).slice(first, rows)


def _check_columns(file: str, names: list[str], columns: Columns) -> None:
    for name in columns:
        if name not in names:
            raise DataError(f"{file} has no field {name!r} (it has {', '.join(names)}): name the text's with --field")


def _first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]


@contextmanager
def _opened(file: str) -> Iterator[tuple[IO[bytes], IO[bytes]]]:
    """Opens a file. Yields its decompressed stream and the raw file under it. Raises DataError if it cannot be read."""
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
    name = file.lower()
    if name.endswith(".gz"):
        return cast(IO[bytes], gzip.GzipFile(fileobj=raw))
    if name.endswith(".xz"):
        return cast(IO[bytes], lzma.LZMAFile(raw))
    if name.endswith(".zst"):
        return cast(IO[bytes], decompressed(raw))
    return raw
