"""Tokenization in any number of processes. The output has the order of the input."""

import os
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from hashlib import sha256
from multiprocessing import get_context, parent_process
from pathlib import Path
from threading import Thread

import numpy as np
from tokenizers import Tokenizer

from data_prep.errors import DataError
from data_prep.parse import EMPTY, Parser, document_key
from data_prep.readers import RawBatch
from data_prep.words import word_encoder

# Known pairs of begin and end tokens, in the order in which a tokenizer is searched for them.
BOUNDARIES = (
    ("<|endoftext|>", "<|endoftext|>"),
    ("<s>", "</s>"),
    ("<bos>", "<eos>"),
    ("<|begin_of_text|>", "<|end_of_text|>"),
)

# The trainer of `tokenizers` reserves 72 bytes per entry at once, and ends the process where it cannot. Saving a tokenizer
# prints every id below the largest that has no token.
LARGEST = 2**24


@dataclass(frozen=True)
class TokenizerInfo:
    """The manifest's description of a tokenizer. vocab_size is the largest id plus one."""

    file: str
    sha256: str
    vocab_size: int
    bos_id: int
    eos_id: int

    @property
    def dtype(self) -> str:
        return "uint16" if self.vocab_size <= 1 << 16 else "uint32"


@dataclass(frozen=True)
class Encoded:
    """The tokenized documents of a batch, in order. Documents that are left out (see `dropped`) have length 0."""

    tokens: np.ndarray  # all documents concatenated, each [BOS] + ids + [EOS]
    lengths: np.ndarray  # int64, tokens of each document
    text_bytes: np.ndarray  # int64, bytes of each document's text
    keys: np.ndarray  # uint64, hash of each document's text, which decides the split
    dropped: dict[str, int]  # reason → number of documents
    consumed: int


def describe(file: str, bos: str | None = None, eos: str | None = None) -> TokenizerInfo:
    """Reads a tokenizer.json and finds its boundary tokens. Raises DataError if it is invalid or has none."""
    tokenizer = load(file)
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    if bos is None and eos is None:
        bos, eos = next((pair for pair in BOUNDARIES if pair[0] in vocabulary and pair[1] in vocabulary), (None, None))
    bos, eos = bos or eos, eos or bos
    if bos is None or eos is None:
        known = ", ".join(" ".join(sorted(set(pair), key=pair.index)) for pair in BOUNDARIES)
        raise DataError(f"{file} has none of the boundary tokens {known}: name its own with --bos and --eos")
    for token in (bos, eos):
        if token not in vocabulary:
            raise DataError(f"{file} has no token {token}")
    digest = sha256(Path(file).read_bytes()).hexdigest()
    return TokenizerInfo("tokenizer.json", digest, vocab_size(tokenizer), vocabulary[bos], vocabulary[eos])


def vocab_size(tokenizer: Tokenizer) -> int:
    """Returns the largest id + 1, which is the number of embeddings that a model needs."""
    return int(max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)) + 1


def load(file: str) -> Tokenizer:
    """Returns a tokenizers.Tokenizer from its JSON file. Raises DataError if it is missing or invalid."""
    if not os.path.isfile(file):
        raise DataError(f"no tokenizer file {file}")
    try:
        tokenizer = Tokenizer.from_file(file)
    except Exception as error:  # tokenizers raises no specific exception
        raise DataError(f"{file} is not a tokenizer of the `tokenizers` library: {error}") from error
    if vocab_size(tokenizer) > LARGEST:
        raise DataError(f"{file} has token id {vocab_size(tokenizer) - 1}: ids must be below {LARGEST:,}")
    # A special token that is spelled out in a document must not create a boundary.
    tokenizer.encode_special_tokens = True
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


class Encoder:
    """Tokenizes batches in a worker process."""

    def __init__(self, file: str, info: TokenizerInfo, parser: Parser):
        self.tokenizer = load(file)
        self.info = info
        self.parser = parser
        self.words = word_encoder(self.tokenizer, info.dtype)

    def __call__(self, batch: RawBatch) -> Encoded:
        """Tokenizes a batch. Raises DataError naming file and line of a broken document."""
        encode = self._from_tokens if batch.kind == "tokens" else self._from_texts
        documents, texts, reasons = encode(batch)
        bos, eos = (np.array([token], self.info.dtype).tobytes() for token in (self.info.bos_id, self.info.eos_id))
        framed = [bos + ids + eos if text else b"" for ids, text in zip(documents, texts)]
        size = np.dtype(self.info.dtype).itemsize
        return Encoded(
            tokens=np.frombuffer(b"".join(framed), self.info.dtype),
            lengths=np.fromiter((len(ids) // size for ids in framed), np.int64, len(framed)),
            text_bytes=np.fromiter(map(len, texts), np.int64, len(texts)),
            keys=np.fromiter(map(document_key, texts), np.uint64, len(texts)),
            dropped=reasons,
            consumed=batch.consumed,
        )

    def _from_texts(self, batch: RawBatch) -> tuple[list[bytes], list[bytes], dict[str, int]]:
        """Returns the ids and the text of each document, both empty if it is left out."""
        texts, reasons = self.parser(batch)
        documents = [self._ids(text) if text else b"" for text in texts]
        return documents, [text.encode() for text in texts], reasons

    def _ids(self, text: str) -> bytes:
        ids = self.words(text) if self.words else None
        if ids is None:
            (encoding,) = self.tokenizer.encode_batch_fast([text], add_special_tokens=False)
            ids = np.array(encoding.ids, self.info.dtype).tobytes()
        return ids

    def _from_tokens(self, batch: RawBatch) -> tuple[list[bytes], list[bytes], dict[str, int]]:
        """Returns the same for documents that are ids. Their decoded text decides the split, as for text input."""
        for index, tokens in enumerate(batch.documents):
            if len(tokens) and not 0 <= tokens.min() <= tokens.max() < self.info.vocab_size:
                wrong = tokens.min() if tokens.min() < 0 else tokens.max()
                raise DataError(
                    f"{batch.where(index)} has token id {wrong}, but the tokenizer has ids 0 to"
                    f" {self.info.vocab_size - 1}: the input was made with another tokenizer"
                )
        texts = self.tokenizer.decode_batch([ids.tolist() for ids in batch.documents], skip_special_tokens=False)
        documents = [ids.astype(self.info.dtype).tobytes() if len(ids) else b"" for ids in batch.documents]
        empty = sum(not text for text in texts)
        return documents, [text.encode() for text in texts], {EMPTY: empty} if empty else {}


_encoder: Encoder | None = None


def _start_worker(file: str, info: TokenizerInfo, parser: Parser) -> None:
    global _encoder
    # The worker processes already use all cores; threads in them would only compete.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _encoder = Encoder(file, info, parser)
    if parent_process() is not None:
        Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """Ends this worker with its parent. If the parent is killed, its workers would otherwise wait forever."""
    parent = parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _work(batch: RawBatch) -> Encoded:
    assert _encoder is not None
    return _encoder(batch)


def encode_all(
    batches: Iterable[RawBatch], file: str, info: TokenizerInfo, parser: Parser, workers: int
) -> Iterator[Encoded]:
    """Yields the tokenized batches in order. At most 2 · workers of them are in memory."""
    if workers <= 1:
        _start_worker(file, info, parser)
        yield from map(_work, batches)
        return
    # With fork, a child of a process with threads may deadlock.
    with ProcessPoolExecutor(workers, get_context("spawn"), _start_worker, (file, info, parser)) as pool:
        waiting: deque[Future[Encoded]] = deque()
        try:
            for batch in batches:
                waiting.append(pool.submit(_work, batch))
                if len(waiting) >= 2 * workers:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        except BrokenProcessPool as error:
            raise DataError("a tokenizing process was killed (out of memory?): try fewer --workers") from error
        finally:
            for future in waiting:
                future.cancel()
