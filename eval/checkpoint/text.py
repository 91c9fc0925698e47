"""Converts between text and tokens as in the training data, and reads held-out documents as text."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from data_prep.errors import DataError
from data_prep.tokenize import describe, load, vocab_size
from data_prep.words import word_encoder
from ssscale.data.stream import PackedData
from ssscale.errors import UserError
from ssscale.train.checkpoint_folder import saved_config
from ssscale.train.same_tokens import TOKENIZER, check_rows, check_same, saved_tokenizer

TEXTS_AT_ONCE = 4096  # limits memory, because encodings are much larger than the tokens


class TextTokenizer:
    """A tokenizer.json with the two tokens that enclose a document: [BOS] + ids + [EOS].

    As in `data_prep`, the spelling of a special token in a text is encoded as ordinary text. So no text can imitate the
    end of a document.
    """

    def __init__(self, file: str, bos_id: int, eos_id: int) -> None:
        try:
            self.tokenizer = load(file)
        except DataError as error:
            raise UserError(str(error)) from error
        self.bos_id, self.eos_id = bos_id, eos_id
        self.vocab_size = vocab_size(self.tokenizer)  # the model may have more rows
        self._words = word_encoder(self.tokenizer, "uint32")

    @classmethod
    def of_checkpoint(cls, checkpoint: Path, data: PackedData | None = None) -> "TextTokenizer":
        """Return the tokenizer in a checkpoint.

        boundaries.json in the checkpoint has the ids of BOS and EOS. Without that file, they come from the manifest of
        `data`, or without data from the names of the tokens.

        Raises UserError if the checkpoint has no tokenizer, if the tokenizer has ids beyond the model's vocabulary, if BOS
        and EOS cannot be determined, or if `data` was packed with another tokenizer.
        """
        file = checkpoint / TOKENIZER
        text = saved_tokenizer(checkpoint)
        if text is None:
            raise UserError(f"checkpoint {checkpoint} has no tokenizer.json: copy it from the data folder")
        if data is not None:
            check_same(data.tokenizer_text, f"the data folder {data.place.path}", text, str(checkpoint))
        found = cls(str(file), *_bounds_of(checkpoint, data))
        check_rows(found.vocab_size - 1, file, saved_config(checkpoint).model.vocab_size, "config.yaml")
        return found

    def encode(self, text: str) -> list[int]:
        """Encode a text without BOS and EOS.

        Words are looked up in a table, which is several times faster for long texts.
        """
        found = self._words(text) if self._words else None
        if found is None:
            return list(self.tokenizer.encode(text, add_special_tokens=False).ids)
        return list(np.frombuffer(found, np.uint32).tolist())

    def encode_batch(self, texts: Sequence[str]) -> Iterator[np.ndarray]:
        """Encode many texts on all cores. Yields int32 tokens per text."""
        for first in range(0, len(texts), TEXTS_AT_ONCE):
            some = list(texts[first : first + TEXTS_AT_ONCE])
            for encoding in self.tokenizer.encode_batch_fast(some, add_special_tokens=False):
                yield np.array(encoding.ids, dtype=np.int32)

    def decode(self, tokens: Sequence[int]) -> str:
        """Decode tokens to text. Bytes that are not valid UTF-8 become U+FFFD."""
        return str(self.tokenizer.decode(list(tokens), skip_special_tokens=False))

    def decode_batch(self, texts: Sequence[Sequence[int]]) -> list[str]:
        """Decode many texts on all cores."""
        return list(self.tokenizer.decode_batch([list(tokens) for tokens in texts], skip_special_tokens=False))


def _bounds_of(checkpoint: Path, data: PackedData | None) -> tuple[int, int]:
    """Return the ids of BOS and EOS. Raises UserError if they cannot be determined."""
    bounds = checkpoint / "boundaries.json"
    if bounds.is_file():
        return _bounds(bounds)
    if data is not None:
        entry = data.manifest["tokenizer"]
        return entry["bos_id"], entry["eos_id"]
    try:
        info = describe(str(checkpoint / TOKENIZER))
    except DataError as error:
        raise UserError(str(error)) from error
    return info.bos_id, info.eos_id


def _bounds(file: Path) -> tuple[int, int]:
    """Read the ids of BOS and EOS from boundaries.json. Raises UserError if the file is broken."""
    try:
        entry = json.loads(file.read_bytes())
        bos, eos = entry["bos_id"], entry["eos_id"]
    except OSError as error:
        raise UserError(f"{file} cannot be read: {error.strerror}") from error
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        raise UserError(f"{file} is broken: {error!r}") from error
    if type(bos) is not int or type(eos) is not int:
        raise UserError(f"{file} is broken: bos_id and eos_id are {bos!r} and {eos!r}, not token ids")
    return bos, eos


@dataclass(frozen=True)
class HeldOut:
    """A stretch of a document without gaps. offset: the index of its first token in the document."""

    source: str
    document: int
    offset: int
    text: str


def held_out(data: PackedData, tokenizer: TextTokenizer, max_tokens: int = 4_000_000) -> Iterator[HeldOut]:
    """Yield the documents of a split as text, joined from their pieces, ordered by source and number.

    Packing drops tokens that do not fill a row, so a document may have gaps. Each stretch between gaps is yielded
    separately. About max_tokens tokens are read at most, divided evenly among the sources.
    """
    share = max(1, max_tokens // len(data.names) // data.length)
    for source in data.names:
        parts: dict[tuple[int, int], np.ndarray] = {}
        for number in range(min(share, data.sources[source])):
            row = data.row(source, number)
            starts = np.cumsum(row.lengths) - row.lengths
            for document, offset, start, length in zip(row.documents, row.offsets, starts, row.lengths, strict=True):
                parts[int(document), int(offset)] = row.tokens[start : start + length]
        for (document, offset), tokens in _joined(parts):
            ids = tokens.astype(np.int64).tolist()
            ids = ids[1:] if offset == 0 and ids[0] == tokenizer.bos_id else ids
            ids = ids[:-1] if ids and ids[-1] == tokenizer.eos_id else ids
            yield HeldOut(source, document, offset, tokenizer.decode(ids))


def _joined(parts: dict[tuple[int, int], np.ndarray]) -> Iterator[tuple[tuple[int, int], np.ndarray]]:
    """Join consecutive pieces of a document. Yields ((document, offset), tokens) per stretch."""
    first: tuple[int, int] | None = None
    stretch: list[np.ndarray] = []
    length = 0
    for key in sorted(parts):
        if first is None or key != (first[0], first[1] + length):
            if first is not None:
                yield first, np.concatenate(stretch)
            first, stretch, length = key, [], 0
        stretch.append(parts[key])
        length += len(parts[key])
    if first is not None:
        yield first, np.concatenate(stretch)
