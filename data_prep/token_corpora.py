"""Corpora that other programs have tokenized: Megatron's .bin/.idx, and llm-foundry's MDS of token arrays.

Both are read as documents without boundary tokens; `tokenize.py` adds these as for text. The tokenizer must be the one
that made the corpus. Only ids beyond its vocabulary reveal a different one.
"""

import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from data_prep.errors import DataError
from data_prep.mds import read_shard
from data_prep.names import bad_shard_name
from data_prep.readers import RawBatch

MAX_TOKENS = 1 << 26  # limit per document
MAGIC = b"MMIDIDX\x00\x00"
DTYPES = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 8: "uint16"}


@dataclass(frozen=True)
class Boundaries:
    """The ids that begin and end a document. They are often equal."""

    bos_id: int
    eos_id: int

    def strip(self, tokens: np.ndarray) -> np.ndarray:
        start = 1 if len(tokens) and tokens[0] == self.bos_id else 0
        end = len(tokens) - (len(tokens) > start and tokens[-1] == self.eos_id)
        return tokens[start:end]


def read_megatron(index: str, boundaries: Boundaries, batch_bytes: int) -> Iterator[RawBatch]:
    """Reads Megatron's indexed data set: .bin holds sequences of ids, .idx groups the sequences to documents."""
    name = index.removesuffix(".idx")
    dtype, lengths, pointers, documents = _read_index(index)
    data = np.memmap(name + ".bin", np.uint8, "r") if lengths.any() else np.empty(0, np.uint8)
    ends = pointers + lengths.astype(np.int64) * dtype.itemsize
    if len(data) < ends.max(initial=0):
        raise DataError(f"{name}.bin has {len(data):,} bytes, its .idx speaks of {ends.max():,}: it is cut off")
    batch: list[np.ndarray] = []
    size, first = 0, 1
    for number, (begin, end) in enumerate(zip(documents[:-1].tolist(), documents[1:].tolist()), start=1):
        sequences = [data[pointers[i] : ends[i]].view(dtype) for i in range(begin, end)]
        tokens = np.concatenate(sequences) if sequences else np.empty(0, dtype)
        batch.append(boundaries.strip(tokens))
        size += tokens.nbytes
        if size >= batch_bytes:
            yield RawBatch("tokens", name + ".bin", first, batch, size)
            batch, size, first = [], 0, number + 1
    if batch:
        yield RawBatch("tokens", name + ".bin", first, batch, size)


def _read_index(file: str) -> tuple[np.dtype, np.ndarray, np.ndarray, np.ndarray]:
    """Returns the token dtype, length and byte offset in .bin of each sequence, and the bounds of documents.

    The bounds are in sequences. Raises DataError if the index is broken.
    """
    content = Path(file).read_bytes()
    try:
        if not content.startswith(MAGIC):
            raise ValueError("it does not begin like one")
        version, code, num_sequences, num_documents = struct.unpack_from("<QBQQ", content, len(MAGIC))
        if version != 1 or code not in DTYPES:
            raise ValueError(f"version {version}, token type {code}")
        at = len(MAGIC) + struct.calcsize("<QBQQ")
        lengths = np.frombuffer(content, np.int32, num_sequences, at)
        pointers = np.frombuffer(content, np.int64, num_sequences, at + lengths.nbytes)
        documents = np.frombuffer(content, np.int64, num_documents, at + lengths.nbytes + pointers.nbytes)
        steps = np.diff(documents)
        if lengths.min(initial=0) < 0 or pointers.min(initial=0) < 0 or steps.min(initial=0) < 0:
            raise ValueError("negative sizes")
        if num_documents and (documents[0] != 0 or documents[-1] != num_sequences):
            raise ValueError("its documents are not its sequences")
    except (ValueError, struct.error) as error:
        raise DataError(f"{file} is no index of a Megatron corpus, or cut off: {error}") from error
    return np.dtype(DTYPES[code]), lengths, pointers, documents


def read_mds(folder: str, boundaries: Boundaries, batch_bytes: int) -> Iterator[RawBatch]:
    """Reads llm-foundry's samples as one stream of ids and cuts it at the boundary tokens."""
    batch: list[np.ndarray] = []
    size, first, consumed, done = 0, 1, 0, 0
    for tokens, num_bytes in _documents(_samples(folder), boundaries, folder):
        consumed = num_bytes
        if len(tokens):
            batch.append(tokens)
            size += tokens.nbytes
        if size >= batch_bytes:
            yield RawBatch("tokens", folder, first, batch, consumed - done)
            first, batch, size, done = first + len(batch), [], 0, consumed
    if batch:
        yield RawBatch("tokens", folder, first, batch, consumed - done)


def _samples(folder: str) -> Iterator[tuple[np.ndarray, int]]:
    """Yields the ids of each sample, and the bytes of the shards up to and including its own."""
    index = Path(folder) / "index.json"
    try:
        shards: list[dict[str, Any]] = json.loads(index.read_bytes())["shards"]
        bad = bad_shard_name(shards)
        if bad is not None:
            raise DataError(f"{index} is not to be trusted: {bad}, which is not the name of a file in its folder")
        consumed = 0
        for shard in shards:
            if "tokens" not in shard["column_names"]:
                raise DataError(f"{index} has no column 'tokens' (it has {', '.join(shard['column_names'])})")
            consumed += (shard["zip_data"] or shard["raw_data"])["bytes"]
            for sample in read_shard(Path(folder), shard):
                tokens = sample["tokens"]
                # Older versions of llm-foundry wrote raw bytes of int64.
                yield np.frombuffer(tokens, np.int64) if isinstance(tokens, bytes) else tokens, consumed
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{index} is missing or broken: {error!r}") from error


def _documents(
    samples: Iterator[tuple[np.ndarray, int]], boundaries: Boundaries, folder: str
) -> Iterator[tuple[np.ndarray, int]]:
    """Cuts the stream of ids after every EOS and before every BOS, and removes these tokens."""
    open_part: list[np.ndarray] = []
    consumed = 0
    for tokens, consumed in samples:
        start = 0
        for at in np.flatnonzero((tokens == boundaries.bos_id) | (tokens == boundaries.eos_id)).tolist():
            yield np.concatenate([*open_part, tokens[start:at]]), consumed
            open_part, start = [], at + 1
        open_part.append(tokens[start:])
        if sum(map(len, open_part)) > MAX_TOKENS:
            raise DataError(
                f"{folder} has {MAX_TOKENS:,} tokens without a boundary (ids {boundaries.bos_id}, {boundaries.eos_id}):"
                " name its own with --bos and --eos"
            )
    if open_part:
        yield np.concatenate(open_part), consumed
