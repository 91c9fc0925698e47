"""Raw documents to texts: UTF-8, JSON records, filters. Errors name file and line."""

import dataclasses
import json
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from data_prep.errors import DataError
from data_prep.sources import RawBatch, is_json_lines

BROKEN, EMPTY, FILTERED = "broken", "empty", "filtered"


def document_key(text: bytes) -> int:
    """64 bits of the text's hash; equal texts fall into the same split."""
    return int.from_bytes(blake2b(text, digest_size=8).digest(), "little")


@dataclass(frozen=True)
class Parser:
    """Texts of a batch. `field` holds a JSON record's text; records whose values differ from `where` are left out."""

    field: str = "text"
    where: dict[str, Any] = dataclasses.field(default_factory=dict)
    skip_broken: bool = False

    def __call__(self, batch: RawBatch) -> tuple[list[str], dict[str, int]]:
        """A text a document, "" for those left out, and how many were left out for which reason.

        Raises DataError for what is broken, unless skip_broken counts it.
        """
        texts = []
        dropped = {BROKEN: 0, EMPTY: 0, FILTERED: 0}
        for index, payload in enumerate(batch.payloads):
            text: str | None = ""
            reason = EMPTY
            try:
                text = self._text(batch, index, payload)
                if text is None:
                    text, reason = "", FILTERED
            except DataError:
                if not self.skip_broken:
                    raise
                text, reason = "", BROKEN
            if not text.strip():
                dropped[reason] += 1
                text = ""
            texts.append(text)
        return texts, {reason: number for reason, number in dropped.items() if number}

    def _text(self, batch: RawBatch, index: int, payload: bytes) -> str | None:
        where = f"{batch.file} line {batch.first_line + index}" if batch.first_line else batch.file
        try:
            text = payload.decode("utf-8")
            if not (batch.first_line and is_json_lines(batch.file)):
                return text
            value = self._json(text, where)
            if value is not None:
                value.encode()  # "\ud800" is valid JSON and no Unicode text
        except UnicodeError as error:
            raise DataError(f"{where} is not valid UTF-8: {error}") from error
        return value

    def _json(self, line: str, where: str) -> str | None:
        if not line.strip():
            return ""
        try:
            record = json.loads(line)
        except ValueError as error:
            raise DataError(f"{where} is not a JSON record: {error}") from error
        if not isinstance(record, dict):
            raise DataError(f"{where} is not a JSON object but {type(record).__name__}")
        if self.field not in record:
            raise DataError(f"{where} has no field {self.field!r} (it has {', '.join(record)}): name it with --field")
        if any(record.get(name) != value for name, value in self.where.items()):
            return None
        text = record[self.field]
        if not isinstance(text, str):
            raise DataError(f"{where}: field {self.field!r} is {type(text).__name__}, not text")
        return text
