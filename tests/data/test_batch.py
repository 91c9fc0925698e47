"""Rows to batches, against a plain loop over tokens."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ssscale.data.batch import Batch, Row, collate
from ssscale.layout import PackedLayout


def make_row(lengths: list[int], seed: int = 0) -> Row:
    tokens = np.random.default_rng(seed).integers(0, 1000, sum(lengths)).astype(np.uint16)
    return Row(tokens, np.array(lengths, np.int32), np.arange(len(lengths)), np.zeros(len(lengths), np.int64))


def check(batch: Batch, rows: list[Row], one_document: bool) -> None:
    length = len(rows[0].tokens)
    tokens, labels, lengths = [], [], []
    for row in rows:
        start = 0
        for size in [length] if one_document else row.lengths.tolist():
            part = row.tokens[start : start + size].tolist()
            tokens += part
            labels += [*part[1:], -100]
            lengths.append(size)
            start += size
    assert batch.tokens.tolist() == tokens
    assert batch.labels.tolist() == labels
    assert batch.num_targets == sum(label != -100 for label in labels)
    plain = PackedLayout.from_lengths(lengths, max_seqlen=length)
    real = len(plain.cu_seqlens)
    cu_seqlens = batch.layout.cu_seqlens
    assert cu_seqlens[:real].equal(plain.cu_seqlens)
    assert (cu_seqlens[real:] == len(tokens)).all()
    assert len(cu_seqlens) in (16, 20, 24, 28, 32, 40, 48, 56, 64, 80, 96)
    assert cu_seqlens.dtype == plain.cu_seqlens.dtype
    assert batch.layout.positions.equal(plain.positions)
    assert batch.layout.max_seqlen == length
    assert batch.layout.uniform_length == (length if set(lengths) == {length} else None)


@settings(max_examples=40, deadline=None)
@given(cuts=st.lists(st.sets(st.integers(1, 19), max_size=19), min_size=1, max_size=4), one_document=st.booleans())
def test_collate_equals_a_plain_loop(cuts, one_document):
    rows = [make_row(np.diff([0, *sorted(cut), 20]).tolist(), seed) for seed, cut in enumerate(cuts)]
    batch = collate(rows, list(range(len(rows))), one_document)
    check(batch, rows, one_document)
    assert batch.sources.tolist() == list(range(len(rows)))


@pytest.mark.parametrize("num_documents", [14, 15, 16, 19, 20, 31, 32])  # around the sizes at which cu_seqlens grows
def test_padding_of_cu_seqlens(num_documents):
    row = make_row([1] * num_documents)
    check(collate([row], [0]), [row], False)


def test_rows_that_fill_up_have_no_targets():
    rows = [make_row([5, 5]), make_row([10]), make_row([3, 7])]
    batch = collate(rows, [0, 0, 0], num_real=2)
    assert (batch.labels[20:] == -100).all()
    assert batch.num_targets == (batch.labels != -100).sum() == 8 + 9


def test_to_moves_everything():
    batch = collate([make_row([4, 6])], [0]).to("meta")
    assert {t.device.type for t in (batch.tokens, batch.labels, batch.sources, batch.layout.cu_seqlens)} == {"meta"}
