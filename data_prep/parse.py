"""Parsing of raw documents to texts: decoding, records and filters. Errors name file and line."""

import dataclasses
import json
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from data_prep.errors import DataError
from data_prep.readers import MAX_DOCUMENT, Columns, RawBatch

BROKEN, EMPTY, FILTERED, DUPLICATE = "broken", "empty", "filtered", "duplicate"


def document_key(text: bytes) -> int:
    """Returns 64 bits of the text's hash. It decides the split, so equal texts fall into the same one."""
    return int.from_bytes(blake2b(text, digest_size=8).digest(), "little")


@dataclass(frozen=True)
class Parser:
    """Parses the documents of a batch to texts.

    field: the record field with the text. where: column (or `column.key` inside it) → the required value, a list of
    allowed values, or {min: a, max: b} (inclusive, both optional); other records are left out. min_chars, max_chars:
    inclusive limits of a text's length. skip_broken: count broken documents instead of raising.
    """

    field: str = "text"
    where: dict[str, Any] = dataclasses.field(default_factory=dict)
    min_chars: int = 0
    max_chars: int | None = None
    skip_broken: bool = False

    @property
    def columns(self) -> Columns:
        """The columns to read from a table."""
        return list(dict.fromkeys([self.field, *(name.partition(".")[0] for name in self.where)]))

    def __call__(self, batch: RawBatch) -> tuple[list[str], dict[str, int]]:
        """Returns one text per document, "" if it is left out, and the number of documents left out by reason.

        Raises DataError for a broken document unless skip_broken is set.
        """
        texts = []
        dropped = {BROKEN: 0, EMPTY: 0, FILTERED: 0}
        for index, document in enumerate(batch.documents):
            reason = EMPTY
            try:
                text = self._text(batch, index, document)
                if text is None:
                    text, reason = "", FILTERED
            except DataError:
                if not self.skip_broken:
                    raise
                text, reason = "", BROKEN
            if not text.strip():
                dropped[reason] += 1
                text = ""
            elif not self.min_chars <= len(text) <= (self.max_chars or len(text)):
                dropped[FILTERED] += 1
                text = ""
            texts.append(text)
        return texts, {reason: number for reason, number in dropped.items() if number}

    def _text(self, batch: RawBatch, index: int, document: Any) -> str | None:
        where = batch.where(index)
        try:
            if batch.kind == "record":
                value = self._field({name: _decoded(cell) for name, cell in document.items()}, where)
            elif len(document) > MAX_DOCUMENT:
                raise DataError(f"{where} is a document of more than {MAX_DOCUMENT >> 20} MiB: divide it")
            elif batch.kind == "text":
                return str(document, "utf-8")
            else:
                value = self._json(str(document, "utf-8"), where)
            if value is not None:
                value.encode()  # "\ud800" is valid JSON but not valid Unicode
        except UnicodeError as error:
            raise DataError(f"{where} is not valid UTF-8: {error}") from error
        return value

    def _json(self, line: str, where: str) -> str | None:
        if not line.strip():
            return ""
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:  # its own line number is that inside the record, always 1
            raise DataError(f"{where} is not a JSON record: {error.msg} at column {error.colno}") from error
        except (ValueError, RecursionError) as error:
            raise DataError(f"{where} is not a JSON record: {error}") from error
        if not isinstance(record, dict):
            raise DataError(f"{where} is not a JSON object but {type(record).__name__}")
        if self.field not in record:
            raise DataError(f"{where} has no field {self.field!r} (it has {', '.join(record)}): name it with --field")
        return self._field(record, where)

    def _field(self, record: dict[str, Any], where: str) -> str | None:
        """Returns the text of a record, or None if it is filtered out."""
        if not all(_holds(_value(record, name), wanted) for name, wanted in self.where.items()):
            return None
        text = record[self.field]
        if not isinstance(text, str):
            raise DataError(f"{where}: field {self.field!r} is {type(text).__name__}, not text")
        return text


def _value(record: Any, name: str) -> Any:
    if not isinstance(record, dict) or name in record:
        return record.get(name) if isinstance(record, dict) else None
    column, dot, rest = name.partition(".")
    return _value(record.get(column), rest) if dot else None


def _decoded(cell: Any) -> Any:
    return str(cell, "utf-8") if isinstance(cell, bytes) else cell


def _holds(value: Any, wanted: Any) -> bool:
    if isinstance(wanted, dict):
        low, high = wanted.get("min", float("-inf")), wanted.get("max", float("inf"))
        return isinstance(value, int | float) and low <= value <= high
    return value in wanted if isinstance(wanted, list) else value == wanted
