"""Text to tokens and back, as the training data has them, and the held-out documents as text."""

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

TEXTS_AT_ONCE = 4096  # their encodings are much larger than their tokens


class TextTokenizer:
    """A tokenizer.json with the two tokens that bound a document: [BOS] + ids + [EOS].

    A special token spelt out in a text is text, as in `data_prep`: no text can forge a document's end.
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
        """The tokenizer that lies in a checkpoint; its boundary tokens as boundaries.json there says.

        Checkpoints without that file: by the data's manifest or else by their names.

        Raises UserError where the checkpoint has none, or where nothing says which tokens bound a document.
        """
        file = checkpoint / "tokenizer.json"
        if not file.is_file():
            raise UserError(f"checkpoint {checkpoint} has no tokenizer.json: copy the one of its data folder there")
        bounds = checkpoint / "boundaries.json"
        if bounds.is_file():
            return cls(str(file), *_bounds(bounds))
        if data is not None:
            entry = data.manifest["tokenizer"]
            return cls(str(file), entry["bos_id"], entry["eos_id"])
        try:
            info = describe(str(file))
        except DataError as error:
            raise UserError(str(error)) from error
        return cls(str(file), info.bos_id, info.eos_id)

    def encode(self, text: str) -> list[int]:
        """The tokens of a text, without boundaries. Its words are looked up: several times as fast in long texts."""
        found = self._words(text) if self._words else None
        if found is None:
            return list(self.tokenizer.encode(text, add_special_tokens=False).ids)
        return list(np.frombuffer(found, np.uint32).tolist())

    def encode_batch(self, texts: Sequence[str]) -> Iterator[np.ndarray]:
        """`encode` of many texts, on all cores: the tokens of each, int32."""
        for first in range(0, len(texts), TEXTS_AT_ONCE):
            some = list(texts[first : first + TEXTS_AT_ONCE])
            for encoding in self.tokenizer.encode_batch_fast(some, add_special_tokens=False):
                yield np.array(encoding.ids, dtype=np.int32)

    def decode(self, tokens: Sequence[int]) -> str:
        """Bytes that are no UTF-8 become U+FFFD."""
        return str(self.tokenizer.decode(list(tokens), skip_special_tokens=False))

    def decode_batch(self, texts: Sequence[Sequence[int]]) -> list[str]:
        """`decode` of many texts, on all cores."""
        return list(self.tokenizer.decode_batch([list(tokens) for tokens in texts], skip_special_tokens=False))


def _bounds(file: Path) -> tuple[int, int]:
    """BOS and EOS of boundaries.json. Raises UserError."""
    try:
        entry = json.loads(file.read_bytes())
        bos, eos = entry["bos_id"], entry["eos_id"]
    except OSError as error:
        raise UserError(f"{file} cannot be read: {error.strerror}") from error
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        raise UserError(f"{file} is broken: {error!r}") from error
    if type(bos) is not int or type(eos) is not int:
        raise UserError(f"{file} is broken: bos_id and eos_id are {bos!r} and {eos!r}, not numbers of tokens")
    return bos, eos


@dataclass(frozen=True)
class HeldOut:
    """A stretch of a document without gaps; `offset` is the number of its first token in the document."""

    source: str
    document: int
    offset: int
    text: str


def held_out(data: PackedData, tokenizer: TextTokenizer, max_tokens: int = 4_000_000) -> Iterator[HeldOut]:
    """The documents of a split, put together again from their parts, by source and number.

    Packing drops the rest that fills no row, so a document may have gaps: each stretch between them comes by itself.
    At most about max_tokens tokens are read, spread evenly over the sources.
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
    """Parts that follow one another in a document as one, under the key of the first."""
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
