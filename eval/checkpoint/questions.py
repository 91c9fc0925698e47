"""Groups log-likelihood requests by shared tokens.

The requests of a question share its context. The contexts of a family of questions share a header, for example few-shot
examples.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

MIN_HEADER = 64  # tokens. Shorter headers are not worth a pass of their own.
MIN_SAVED = 4096  # tokens that a header must save in total


class Question(NamedTuple):
    """A context and the requests that continue it.

    context: [n] int32 tokens.
    members: indices of the requests.
    family: index of the family, -1 without one.
    header: number of first tokens that all questions of the family share, 0 without a family.
    """

    context: np.ndarray
    members: list[int]
    family: int = -1
    header: int = 0

    def slots(self, answers: Sequence[np.ndarray]) -> int:
        """Return the number of KV cache slots that the answers need.

        It is 1 if each answer is one token, because the last token of the context predicts them all.
        """
        return 1 if all(len(answers[i]) == 1 for i in self.members) else len(self.members)

    def rows(self, answers: Sequence[np.ndarray]) -> int:
        """Return the rows of logits. The last token of the context predicts the first token of every answer."""
        return 1 + sum(len(answers[i]) - 1 for i in self.members)

    def size(self, answers: Sequence[np.ndarray]) -> int:
        """Return the tokens of the longest sequence. The last token of an answer is only predicted, never an input."""
        return len(self.context) + max(len(answers[i]) for i in self.members) - 1


def with_headers(questions: list[Question]) -> list[Question]:
    """Group questions whose contexts begin with the same tokens into families.

    Returns the questions with families first, family by family, then the others unchanged.
    """
    contexts = [question.context for question in questions]
    # Big-endian bytes sort like the tokens.
    order = sorted(range(len(questions)), key=lambda i: contexts[i].astype(">u4").tobytes())
    common = [0, *(_common(contexts[a], contexts[b]) for a, b in pairwise(order)), 0]
    families: list[tuple[int, list[int]]] = []
    for at, index in enumerate(order):
        # A question does not join a family if it shares far more with the next question. Nor does it join if the family
        # would lose more by a shorter header than this question saves.
        if common[at] >= MIN_HEADER and common[at + 1] <= 2 * common[at]:
            header, members = families[-1]
            shorter = min(header, common[at])
            if len(members) * shorter >= (len(members) - 1) * header:
                members.append(index)
                families[-1] = (shorter, members)
                continue
        families.append((len(contexts[index]) - 1, [index]))
    found: list[Question] = []
    alone: list[int] = []
    for number, (header, members) in enumerate(families):
        if header >= MIN_HEADER and (len(members) - 1) * header >= MIN_SAVED:
            found += [questions[i]._replace(family=number, header=header) for i in members]
        else:
            alone += members
    return found + [questions[i] for i in sorted(alone)]


def _common(a: np.ndarray, b: np.ndarray) -> int:
    """Return the length of the common prefix, at most one token less than either has."""
    length = min(len(a), len(b)) - 1
    different = np.flatnonzero(a[:length] != b[:length])
    return int(different[0]) if len(different) else length


def pack_families(
    questions: list[Question], answers: Sequence[np.ndarray], max_tokens: int, max_rows: int, max_cached: int
) -> Iterator[list[Question]]:
    """Yield batches of questions, which must be ordered family by family.

    max_tokens: tokens per pass. max_rows: rows of logits per batch. max_cached: cached tokens per batch, which is slots
    times the longest sequence.
    """
    batch: list[Question] = []
    tokens = rows = slots = width = 0
    for question in questions:
        rest = len(question.context) - question.header
        for _ in range(2):
            new = rest if batch and batch[-1].family == question.family else rest + question.header
            grown = (tokens + new, rows + question.rows(answers), slots + question.slots(answers))
            wide = max(width, question.size(answers) + 1)
            if not batch or (grown[0] <= max_tokens and grown[1] <= max_rows and grown[2] * wide <= max_cached):
                break
            yield batch
            batch, tokens, rows, slots, width = [], 0, 0, 0, 0
        batch.append(question)
        (tokens, rows, slots), width = grown, wide
    if batch:
        yield batch
