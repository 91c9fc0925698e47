"""A baseline for the validation loss: an interpolated Kneser–Ney bigram model of the same training tokens."""

from collections.abc import Iterable
from typing import Self

import numpy as np

from ssscale.data.batch import Batch
from ssscale.layout import IGNORE

DISCOUNT = 0.75
MAX_TRAINING_TOKENS = 50_000_000  # counts are held in memory, and more tokens take many GB

Pairs = tuple[np.ndarray, np.ndarray]


def target_pairs(batches: Iterable[Batch]) -> Pairs:
    """Return (contexts, targets), [n] int64 each: for every target of the model, the token before it and the target."""
    contexts, targets = [], []
    for batch in batches:
        labels = batch.labels.numpy()
        counted = labels != IGNORE
        contexts.append(batch.tokens.numpy()[counted])
        targets.append(labels[counted])
    return np.concatenate(contexts), np.concatenate(targets)


class KneserNeyBigram:
    """p(w | v) = max(c(v w) − d, 0) / c(v) + d N(v ·) / c(v) · q(w)
    q(w) = max(N(· w) − d, 0) / N(· ·) + d N⁺ / N(· ·) · 1 / V

    This is the interpolated form of Kneser–Ney smoothing (Chen and Goodman 1998, TR-10-98, Section 2.7) with one
    discount d. V is the vocabulary size. c counts pairs. N(v ·) is the number of distinct tokens seen after v, N(· w)
    of distinct tokens seen before w, N(· ·) of distinct pairs, and N⁺ of distinct tokens w seen after any token. q is
    discounted like p, so that a token that was never seen has a probability. For a context v that was never seen,
    p = q.
    """

    def __init__(self, keys: np.ndarray, counts: np.ndarray, vocab_size: int, discount: float = DISCOUNT) -> None:
        """keys: [pairs] int64, v · vocab_size + w, ascending and distinct. counts: [pairs], occurrences of each."""
        self.keys, self.counts, self.vocab_size, self.discount = keys, counts, vocab_size, discount
        before, after = keys // vocab_size, keys % vocab_size
        self.context_counts = np.bincount(before, counts, vocab_size)  # c(v), float64
        self.followers = np.bincount(before, minlength=vocab_size)  # N(v ·)
        preceders = np.bincount(after, minlength=vocab_size)  # N(· w)
        kept = np.maximum(preceders - discount, 0) / len(keys)
        self.continuation = kept + discount * np.count_nonzero(preceders) / len(keys) / vocab_size  # q

    @classmethod
    def train(cls, pairs: Pairs, vocab_size: int, discount: float = DISCOUNT) -> Self:
        """Count the pairs. Raises ValueError if there are none."""
        if not len(pairs[0]):
            raise ValueError("a bigram model needs at least one pair of tokens")
        keys, counts = np.unique(pairs[0] * vocab_size + pairs[1], return_counts=True)
        return cls(keys, counts, vocab_size, discount)

    def probability(self, contexts: np.ndarray, targets: np.ndarray) -> np.ndarray:
        """Return p(target | context), [n] float64. contexts, targets: [n] int64."""
        wanted = contexts * self.vocab_size + targets
        place = np.minimum(np.searchsorted(self.keys, wanted), len(self.keys) - 1)
        pair_counts = np.where(self.keys[place] == wanted, self.counts[place], 0)
        total = self.context_counts[contexts]
        unseen = total == 0
        total = np.where(unseen, 1, total)
        kept = np.maximum(pair_counts - self.discount, 0) / total
        freed = np.where(unseen, 1, self.discount * self.followers[contexts] / total)
        return kept + freed * self.continuation[targets]

    def loss(self, pairs: Pairs) -> float:
        """Return the mean of −ln p(target | context) in nats per token."""
        return float(-np.log(self.probability(*pairs)).mean())
