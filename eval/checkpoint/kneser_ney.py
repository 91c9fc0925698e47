"""The baseline beside a model's validation loss: an interpolated Kneser–Ney bigram of the same training tokens."""

from collections.abc import Iterable
from typing import Self

import numpy as np

from ssscale.data.batch import IGNORE, Batch

DISCOUNT = 0.75
MAX_TRAINING_TOKENS = 50_000_000  # counted in memory: more would take many GB

Pairs = tuple[np.ndarray, np.ndarray]


def target_pairs(batches: Iterable[Batch]) -> Pairs:
    """(contexts, targets), [n] int64 each: for each target of the model, the token before it and the target itself."""
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

    The interpolated form of Kneser–Ney smoothing (Chen and Goodman 1998, TR-10-98, Section 2.7) with one discount d.
    c counts pairs, N(v ·) the different tokens seen after v, N(· w) the different tokens seen before w, N(· ·) the
    different pairs, and N⁺ the tokens w seen at all. q is discounted like p, so that a token without any count has
    a probability; after a v never seen, p is q.
    """

    def __init__(self, keys: np.ndarray, counts: np.ndarray, vocab_size: int, discount: float = DISCOUNT) -> None:
        """keys: [pairs] int64, v · vocab_size + w, ascending and different; counts: [pairs], how often each occurs."""
        self.keys, self.counts, self.vocab_size, self.discount = keys, counts, vocab_size, discount
        before, after = keys // vocab_size, keys % vocab_size
        self.context_counts = np.bincount(before, counts, vocab_size)  # c(v), float64
        self.followers = np.bincount(before, minlength=vocab_size)  # N(v ·)
        preceders = np.bincount(after, minlength=vocab_size)  # N(· w)
        kept = np.maximum(preceders - discount, 0) / len(keys)
        self.continuation = kept + discount * np.count_nonzero(preceders) / len(keys) / vocab_size  # q

    @classmethod
    def train(cls, pairs: Pairs, vocab_size: int, discount: float = DISCOUNT) -> Self:
        """Count the pairs. Raises ValueError where there are none."""
        if not len(pairs[0]):
            raise ValueError("a bigram model needs at least one pair of tokens")
        keys, counts = np.unique(pairs[0] * vocab_size + pairs[1], return_counts=True)
        return cls(keys, counts, vocab_size, discount)

    def probability(self, contexts: np.ndarray, targets: np.ndarray) -> np.ndarray:
        """p(target | context), [n] float64."""
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
        """Mean −ln p(target | context), in nats a token."""
        return float(-np.log(self.probability(*pairs)).mean())
