"""Whole documents out of packed rows: what evaluation on held-out documents needs."""

from collections import defaultdict
from collections.abc import Iterator

import numpy as np

from ssscale.data.stream import PackedData


def whole_documents(data: PackedData) -> Iterator[tuple[str, int, np.ndarray]]:
    """(source, document number, tokens) of each document all of whose tokens are in the split, BOS and EOS included.

    By source, then number. Holds a source's tokens in memory, so it is for validation splits. A document is missing if
    one of its parts was dropped with the split's last, unfilled row.
    """
    eos = data.manifest["tokenizer"]["eos_id"]
    for source, store in data.stores.items():
        parts = defaultdict(list)
        for number in range(len(store)):
            row = store[number]
            pieces = np.split(row.tokens, np.cumsum(row.lengths)[:-1])
            for document, offset, tokens in zip(row.documents.tolist(), row.offsets.tolist(), pieces):
                parts[document].append((offset, tokens))
        for document in sorted(parts):
            found = sorted(parts[document], key=lambda part: part[0])
            offsets = np.array([offset for offset, _ in found])
            sizes = np.array([len(tokens) for _, tokens in found])
            gapless = np.array_equal(offsets, np.cumsum(sizes) - sizes)
            tokens = np.concatenate([tokens for _, tokens in found])
            # The first token may equal EOS too, so a lone one is no whole document.
            if gapless and len(tokens) > 1 and tokens[-1] == eos:
                yield source, document, tokens
