import math
from collections import Counter, defaultdict
from itertools import pairwise

import numpy as np
import pytest

from eval.checkpoint.kneser_ney import DISCOUNT, KneserNeyBigram, target_pairs
from eval.checkpoint.validation import all_batches, bigram_loss, model_loss
from ssscale.data.stream import PackedData

VOCAB = 7


def plain_probability(pairs: list[tuple[int, int]], v: int, w: int, vocab_size: int) -> float:
    """Interpolated Kneser–Ney from its definition, with dictionaries."""
    d = DISCOUNT
    counts = Counter(pairs)
    preceders, followers = defaultdict(set), defaultdict(set)
    for a, b in counts:
        followers[a].add(b)
        preceders[b].add(a)
    seen = [x for x in range(vocab_size) if preceders[x]]
    q = max(len(preceders[w]) - d, 0) / len(counts) + d * len(seen) / len(counts) / vocab_size
    total = sum(count for (a, _), count in counts.items() if a == v)
    if total == 0:
        return q
    return max(counts[v, w] - d, 0) / total + d * len(followers[v]) / total * q


@pytest.fixture
def pairs() -> list[tuple[int, int]]:
    # Token 6 is never seen, token 5 never follows anything, token 4 is never followed.
    return [(0, 1), (0, 1), (0, 2), (1, 2), (1, 0), (5, 1), (2, 4), (2, 2), (2, 2), (2, 2), (0, 3)]


def as_arrays(pairs: list[tuple[int, int]]) -> tuple[np.ndarray, np.ndarray]:
    array = np.array(pairs)
    return array[:, 0], array[:, 1]


def test_equals_the_definition_and_sums_to_one(pairs):
    bigram = KneserNeyBigram.train(as_arrays(pairs), VOCAB)
    v, w = np.divmod(np.arange(VOCAB * VOCAB), VOCAB)
    got = bigram.probability(v, w).reshape(VOCAB, VOCAB)
    expected = [[plain_probability(pairs, a, b, VOCAB) for b in range(VOCAB)] for a in range(VOCAB)]
    assert np.abs(got - expected).max() < 1e-15
    assert np.abs(got.sum(1) - 1).max() < 1e-15
    assert got.min() > 0


def test_loss_is_the_mean_of_negative_logarithms(pairs):
    bigram = KneserNeyBigram.train(as_arrays(pairs), VOCAB)
    held_out = [(0, 1), (6, 6), (4, 2)]
    expected = -sum(math.log(plain_probability(pairs, v, w, VOCAB)) for v, w in held_out) / 3
    assert bigram.loss(as_arrays(held_out)) == pytest.approx(expected, rel=1e-12)


def test_pairs_stay_within_parts_and_are_the_targets_of_the_model(valid: PackedData, model):
    expected = []
    for _, row in valid.rows():
        start = 0
        for length in row.lengths.tolist():
            part = row.tokens[start : start + length].tolist()
            expected += list(pairwise(part))
            start += length
    contexts, targets = target_pairs(all_batches(valid, one_document=False, microbatch=4))
    assert Counter(zip(contexts.tolist(), targets.tolist(), strict=True)) == Counter(expected)
    train = PackedData.open(valid.place.path, "train")
    assert bigram_loss(train, valid, False).targets == model_loss(model, valid, 4, False).targets == len(expected)


def test_one_document_a_row_counts_pairs_across_parts(valid: PackedData):
    contexts, _ = target_pairs(all_batches(valid, one_document=True))
    assert len(contexts) == sum(valid.sources.values()) * (valid.length - 1)


def test_bits_a_byte(valid: PackedData):
    loss = bigram_loss(PackedData.open(valid.place.path, "train"), valid, False)
    assert loss.bits_per_byte == pytest.approx(loss.nats_per_token / math.log(2) / valid.bytes_per_target)


def test_no_pairs():
    with pytest.raises(ValueError, match="at least one pair"):
        KneserNeyBigram.train((np.array([], np.int64), np.array([], np.int64)), VOCAB)
