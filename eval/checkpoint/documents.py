"""Reads documents: JSON lines with the key `text` (or `page`), or a plain text file as one document."""

import hashlib
import io
import json
from collections.abc import Iterator
from pathlib import Path

import zstandard

from ssscale.data.zstd import decompressed
from ssscale.errors import UserError

KEYS = ("text", "page")


def read_documents(file: Path, option: str = "--texts=") -> Iterator[str]:
    """Yield the texts of FILE.jsonl, one per line, or the whole content of any other file. Both may be compressed as .zst.

    Raises UserError if the file is missing or broken. option: prefix of the file name in messages.
    """
    if not file.is_file():
        raise UserError(f"{option}{file}: there is no such file")
    try:
        with file.open("rb") as raw:
            packed = file.suffix == ".zst"
            stream = decompressed(raw) if packed else raw
            lines = io.TextIOWrapper(stream, encoding="utf-8")
            if ".jsonl" not in file.suffixes:
                yield lines.read()
                return
            for number, line in enumerate(lines, 1):
                if line.strip():
                    yield _text(line, file, number)
    except (OSError, EOFError, UnicodeDecodeError, zstandard.ZstdError) as error:
        raise UserError(f"{option}{file} cannot be read: {error}") from None


def sha256_of(file: Path, option: str = "--texts=") -> str:
    """Return the SHA-256 of a file of documents, by which results of other texts are known. Raises UserError as above."""
    if not file.is_file():
        raise UserError(f"{option}{file}: there is no such file")
    try:
        with file.open("rb") as opened:
            return hashlib.file_digest(opened, "sha256").hexdigest()
    except OSError as error:
        raise UserError(f"{option}{file} cannot be read: {error}") from None


def _text(line: str, file: Path, number: int) -> str:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        raise UserError(f"{file}, line {number}, is not JSON") from None
    found = [record[key] for key in KEYS if isinstance(record, dict) and isinstance(record.get(key), str)]
    if not found:
        raise UserError(f"{file}, line {number}, has no string with the key {' or '.join(KEYS)}")
    return str(found[0])
