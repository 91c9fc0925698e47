"""Packing rows: nothing is lost, nothing is padded, documents are cut as little as they can be."""

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_prep.pack import BestFitPacker, ConcatPacker, Packer, Part, best_fit


def run(packer: Packer, lengths: list[int]) -> list[list[Part]]:
    rows = []
    for number, length in enumerate(lengths):
        rows += packer.add(number, number * 1000 + np.arange(length), num_bytes=length)
    return rows + list(packer.finish())


@pytest.mark.parametrize(
    "make", [ConcatPacker, lambda n: BestFitPacker(n, 1 << 20, ""), lambda n: BestFitPacker(n, 50, "")]
)
@settings(max_examples=60, deadline=None)
@given(lengths=st.lists(st.integers(1, 70), max_size=40), row_length=st.integers(2, 33))
def test_every_token_lies_in_one_row_or_is_counted(make, lengths, row_length):
    packer = make(row_length)
    rows = run(packer, lengths)
    seen: set[int] = set()
    for row in rows:
        assert sum(len(part.tokens) for part in row) == row_length
        for part in row:
            tokens = part.tokens.tolist()
            # The tokens spell their document and offset, so that a part cannot lie about itself.
            assert tokens == list(
                range(part.document * 1000 + part.offset, part.document * 1000 + part.offset + len(tokens))
            )
            assert seen.isdisjoint(tokens)
            seen.update(tokens)
    counts = packer.counts
    assert counts.tokens_in == sum(lengths) == len(seen) + sum(counts.tokens_dropped.values())
    assert counts.tokens_out == len(seen) == counts.rows * row_length
    assert sum(counts.tokens_dropped.values()) < row_length


@settings(max_examples=60, deadline=None)
@given(lengths=st.lists(st.integers(1, 20), max_size=30))
def test_best_fit_equals_its_definition(lengths):
    """Against the plain statement: longest first, into the row with the least room that is enough."""
    rows = best_fit([Part(i, 0, np.arange(n)) for i, n in enumerate(lengths)], 20)
    sizes: list[int] = []
    for length in sorted(lengths, reverse=True):
        fitting = [i for i, size in enumerate(sizes) if size + length <= 20]
        if fitting:
            sizes[max(fitting, key=lambda i: sizes[i])] += length
        else:
            sizes.append(length)
    assert sorted(sum(len(part.tokens) for part in row) for row in rows) == sorted(sizes)


def test_rows_may_be_longer_than_memory():
    """A row of 10^14 tokens took as many bits, and one of 10^7 a minute."""
    rows = best_fit([Part(i, 0, np.arange(5)) for i in range(3)], 10**14)
    assert [[part.document for part in row] for row in rows] == [[0, 1, 2]]


def test_best_fit_cuts_few_documents():
    lengths = [int(random.Random(i).lognormvariate(5.5, 1.0)) % 1024 + 1 for i in range(3000)]
    best, concat = BestFitPacker(1024, 1 << 20, ""), ConcatPacker(1024)
    run(best, lengths), run(concat, lengths)
    assert best.counts.tokens_out / best.counts.tokens_in >= 0.995
    # Concatenation cuts a document at nearly every row's end.
    assert best.counts.parts - len(lengths) < 0.2 * (concat.counts.parts - len(lengths))
