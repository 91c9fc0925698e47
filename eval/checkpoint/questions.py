"""What log-likelihood requests share: a context with their neighbours, contexts a header (the examples before each)."""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

MIN_HEADER = 64  # tokens that are worth a pass of their own
MIN_SAVED = 4096  # and what it must save in all


class Question(NamedTuple):
    """A context's tokens and the numbers of the requests that continue it.

    header: its first tokens, which the others of its family share; 0: it has no family.
    """

    context: np.ndarray
    members: list[int]
    family: int = -1
    header: int = 0

    def slots(self, answers: Sequence[np.ndarray]) -> int:
        """Sequences of a key/value cache that the answers take: one where the context's last token predicts all of them."""
        return 1 if all(len(answers[i]) == 1 for i in self.members) else len(self.members)

    def rows(self, answers: Sequence[np.ndarray]) -> int:
        """Of logits: the context's last token predicts all answers' first ones."""
        return 1 + sum(len(answers[i]) - 1 for i in self.members)

    def size(self, answers: Sequence[np.ndarray]) -> int:
        """Tokens of the longest sequence. An answer's last token is predicted only, so it takes no room."""
        return len(self.context) + max(len(answers[i]) for i in self.members) - 1


def with_headers(questions: list[Question]) -> list[Question]:
    """The questions whose contexts begin alike, family by family, then the others as they are."""
    contexts = [question.context for question in questions]
    # Big-endian bytes sort as the tokens do.
    order = sorted(range(len(questions)), key=lambda i: contexts[i].astype(">u4").tobytes())
    common = [0, *(_common(contexts[a], contexts[b]) for a, b in pairwise(order)), 0]
    families: list[tuple[int, list[int]]] = []
    for at, index in enumerate(order):
        # A family is not joined by one that has far more in common with the next, nor where the others would lose more
        # by a shorter header than this one saves.
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
    """The tokens that both begin with, one less than either has."""
    length = min(len(a), len(b)) - 1
    different = np.flatnonzero(a[:length] != b[:length])
    return int(different[0]) if len(different) else length


def pack_families(
    questions: list[Question], answers: Sequence[np.ndarray], max_tokens: int, max_rows: int, max_cached: int
) -> Iterator[list[Question]]:
    """Batches of questions that stand family by family: at most so many tokens a pass, rows of logits and cached tokens."""
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
