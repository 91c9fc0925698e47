"""Packing of documents to rows of exactly `length` tokens, without padding.

Only tokens that cannot fill a last row are dropped. `concat` concatenates documents and cuts every `length` tokens
(concatenate-and-split). `best-fit` first splits the documents that are longer than a row, and packs all parts best-fit
decreasing (arXiv:2404.10830). It then fills the gaps that remain: it takes parts from the emptiest rows and splits them
where needed.
"""

import random
from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

import numpy as np


class Part(NamedTuple):
    """A contiguous part of a document that starts at token `offset`."""

    document: int
    offset: int
    tokens: np.ndarray

    def split(self, at: int) -> "tuple[Part, Part]":
        return self._replace(tokens=self.tokens[:at]), Part(self.document, self.offset + at, self.tokens[at:])


Row = list[Part]


def _size(parts: list[Part]) -> int:
    return sum(len(part.tokens) for part in parts)


@dataclass
class Counts:
    """Token counts. They satisfy tokens_in = tokens_out + sum(tokens_dropped.values())."""

    documents: int = 0
    bytes: int = 0
    tokens_in: int = 0
    rows: int = 0
    tokens_out: int = 0
    parts: int = 0
    tokens_dropped: dict[str, int] = field(default_factory=dict)
    documents_dropped: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Held:
    """The state of a packer between rows. values: plain JSON. parts: the pending parts with their tokens."""

    values: dict[str, Any]
    parts: list[Part]


class Packer:
    """The base class, which counts tokens. `add` documents, then `finish`; both yield the rows that are complete."""

    def __init__(self, length: int):
        self.length = length
        self.counts = Counts()

    def add(self, document: int, tokens: np.ndarray, num_bytes: int) -> Iterator[Row]:
        self.counts.documents += 1
        self.counts.bytes += num_bytes
        self.counts.tokens_in += len(tokens)
        for row in self._add(Part(document, 0, tokens)):
            yield self._counted(row)

    def finish(self) -> Iterator[Row]:
        for row in self._finish():
            yield self._counted(row)
        dropped = self.counts.tokens_in - self.counts.tokens_out
        if dropped:
            self.counts.tokens_dropped["last row not full"] = dropped

    def held(self) -> Held:
        """Returns the state with which `restore` continues in another process."""
        values, parts = self._held()
        return Held({"counts": asdict(self.counts), **values}, parts)

    def restore(self, held: Held) -> None:
        """Continues from the state of a packer with the same settings.

        Raises LookupError, TypeError or ValueError if the state is broken.
        """
        self.counts = Counts(**held.values["counts"])
        self._restore(held)

    def _held(self) -> tuple[dict[str, Any], list[Part]]:
        raise NotImplementedError

    def _restore(self, held: Held) -> None:
        raise NotImplementedError

    def _counted(self, row: Row) -> Row:
        self.counts.rows += 1
        self.counts.parts += len(row)
        self.counts.tokens_out += self.length
        return row

    def _add(self, part: Part) -> Iterator[Row]:
        raise NotImplementedError

    def _finish(self) -> Iterator[Row]:
        raise NotImplementedError


class ConcatPacker(Packer):
    """Concatenates documents and cuts every `length` tokens."""

    def __init__(self, length: int):
        super().__init__(length)
        self.row: Row = []
        self.room = length

    def _add(self, part: Part) -> Iterator[Row]:
        while len(part.tokens) >= self.room:
            head, part = part.split(self.room)
            yield [*self.row, head]
            self.row, self.room = [], self.length
        if len(part.tokens):
            self.row.append(part)
            self.room -= len(part.tokens)

    def _finish(self) -> Iterator[Row]:
        return iter(())

    def _held(self) -> tuple[dict[str, Any], list[Part]]:
        return {}, self.row

    def _restore(self, held: Held) -> None:
        self.row = list(held.parts)
        self.room = self.length - _size(self.row)
        if self.room < 1:
            raise ValueError("more tokens than a row has")


class BestFitPacker(Packer):
    """Best-fit decreasing over a buffer of documents, which limits the memory. Rows leave the buffer in shuffled order.

    Packing sorts by length, and a reader shuffles only among neighbouring rows, so the rows are shuffled here.
    """

    def __init__(self, length: int, buffer_tokens: int, seed: str):
        super().__init__(length)
        self.buffer_tokens = max(buffer_tokens, length)
        self.random = random.Random(seed)
        self.full: list[Row] = []
        self.parts: list[Part] = []
        self.held_tokens = 0

    def _add(self, part: Part) -> Iterator[Row]:
        self.held_tokens += len(part.tokens)
        while len(part.tokens) > self.length:
            head, part = part.split(self.length)
            self.full.append([head])
        self.parts.append(part)
        if self.held_tokens >= self.buffer_tokens:
            yield from self._flush()

    def _finish(self) -> Iterator[Row]:
        yield from self._flush()

    def _held(self) -> tuple[dict[str, Any], list[Part]]:
        version, numbers, gauss = self.random.getstate()
        values = {"random": [version, list(numbers), gauss], "full": len(self.full)}
        return values, [part for row in self.full for part in row] + self.parts

    def _restore(self, held: Held) -> None:
        version, numbers, gauss = held.values["random"]
        self.random.setstate((version, tuple(numbers), gauss))
        full = held.values["full"]
        self.full, self.parts = [[part] for part in held.parts[:full]], held.parts[full:]
        self.held_tokens = _size(held.parts)
        if any(_size(row) != self.length for row in self.full):
            raise ValueError("a full row that is not full")

    def _flush(self) -> Iterator[Row]:
        rows, left = close_rows(best_fit(self.parts, self.length), self.length)
        rows += self.full
        self.full, self.parts, self.held_tokens = [], left, _size(left)
        self.random.shuffle(rows)
        for row in rows:
            self.random.shuffle(row)
            yield row


def best_fit(parts: list[Part], length: int) -> list[Row]:
    """Packs parts best-fit decreasing: the longest part first, each into the fullest row that has room for it."""
    rows: list[Row] = []
    with_room: defaultdict[int, list[int]] = defaultdict(list)  # rows, by their free tokens
    rooms: list[int] = []  # the keys of with_room that have rows, ascending
    for part in sorted(parts, key=lambda part: -len(part.tokens)):
        size = len(part.tokens)
        tightest = bisect_left(rooms, size)
        if tightest < len(rooms):
            room = rooms[tightest]
            row = with_room[room].pop()
            if not with_room[room]:
                del rooms[tightest]
            rows[row].append(part)
        else:
            room, row = length, len(rows)
            rows.append([part])
        if room > size:
            if not with_room[room - size]:
                insort(rooms, room - size)
            with_room[room - size].append(row)
    return rows


def close_rows(rows: list[Row], length: int) -> tuple[list[Row], list[Part]]:
    """Fills the gaps of the fullest rows with parts of the emptiest. Returns full rows, and the parts left over."""
    sizes = [sum(len(part.tokens) for part in row) for row in rows]
    order = sorted(range(len(rows)), key=lambda index: (-sizes[index], index))
    closed: list[Row] = []
    stock: list[Part] = []
    first, last = 0, len(order)
    while first < last:
        row, gap = rows[order[first]], length - sizes[order[first]]
        first += 1
        while gap:
            if not stock:
                if first == last:
                    return closed, row
                last -= 1
                stock = list(rows[order[last]])
            part = stock.pop()
            if len(part.tokens) > gap:
                part, rest = part.split(gap)
                stock.append(rest)
            row.append(part)
            gap -= len(part.tokens)
        closed.append(row)
    return closed, stock
