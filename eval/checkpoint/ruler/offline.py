"""lm-eval's generators of RULER samples without downloads, prints and hidden random states.

At import, lm-eval's modules download nltk's punkt model and build a list of 6 million words. This takes 1 GB and half a
minute per process. Here a rule splits sentences, and each word is built on request.
"""

import random
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, lru_cache
from typing import Any

import numpy as np
import wonderwords

from eval.checkpoint.lm_eval_patches import importing_ruler, ruler_uses

with importing_ruler():
    from lm_eval.tasks.ruler import prepare_niah
from lm_eval.tasks.ruler import cwe_utils, fwe_utils, niah_utils, qa_utils, vt_utils

__all__ = ["cwe_utils", "fwe_utils", "niah_utils", "offline", "prepare_niah", "qa_utils", "seeded", "vt_utils"]

SEED = 42  # as in RULER
Track = Callable[[Iterable[int]], Iterable[int]]

SENTENCE_END = re.compile(r"""(?<!\S)(\S+[.!?])["')\]”’]*\s+(?=["'(\[“‘]?[A-Z0-9])""")
ABBREVIATION = re.compile(r"""["'(\[“‘]*(?:Mr|Mrs|Ms|Dr|St|Prof|Rev|Hon|Gen|Col|Capt|Lieut|Vol|No|[A-Z])\.""")


def split_sentences(text: str) -> list[str]:
    """Split a text into sentences by a rule, in place of nltk's punkt model.

    A sentence ends after `.`, `!` or `?`, optional closing quotes or brackets, and white space. The next sentence must
    start with a capital or a digit, after optional opening quotes or brackets. A full stop after a title or an initial
    does not end a sentence.
    """
    sentences, start = [], 0
    for end in SENTENCE_END.finditer(text):
        if not ABBREVIATION.fullmatch(end[1]):
            sentences.append(text[start : end.end()].rstrip())
            start = end.end()
    return sentences + ([text[start:]] if start < len(text) else [])


class CompoundWords(Sequence[str]):
    """The sequence sorted({f"{adjective}-{noun}"}), without storing its strings."""

    def __init__(self, adjectives: Iterable[str], nouns: Iterable[str]) -> None:
        self.nouns = sorted(set(nouns))
        self.firsts = sorted(f"{adjective}-" for adjective in set(adjectives))
        # "blue-eyed-" sorts among the words of "blue-". Both belong to one run, whose words are sorted together.
        self.roots: list[int] = []
        for index, first in enumerate(self.firsts):
            root = self.roots[-1] if self.roots else 0
            self.roots.append(root if first.startswith(self.firsts[root]) else index)

    def __len__(self) -> int:
        return len(self.firsts) * len(self.nouns)

    def __getitem__(self, index: Any) -> Any:
        if not 0 <= index < len(self):
            raise IndexError(index)
        first, noun = divmod(index, len(self.nouns))
        root = self.roots[first]
        if self.roots.count(root) == 1:
            return self.firsts[first] + self.nouns[noun]
        return self._run(root)[index - root * len(self.nouns)]

    @lru_cache(maxsize=64)  # noqa: B019 - there is one object per process
    def _run(self, root: int) -> list[str]:
        firsts = [first for first, own in zip(self.firsts, self.roots, strict=True) if own == root]
        return sorted(first + noun for first in firsts for noun in self.nouns)


@cache
def words() -> CompoundWords:
    """Return the words of prepare_niah.WORDS."""
    categories = wonderwords.RandomWord()._categories
    return CompoundWords(categories["adjectives"], categories["nouns"])


def _tracking(track: Track) -> Callable[..., Iterator[int]]:
    def bar(steps: Iterable[int], *_: Any, **__: Any) -> Iterator[int]:
        yield from track(steps)

    return bar


@contextmanager
def seeded() -> Iterator[None]:
    """Seed the global random generators with SEED, and restore their states afterwards."""
    before, numbers = random.getstate(), np.random.get_state()
    random.seed(SEED)
    np.random.seed(SEED)
    try:
        yield
    finally:
        random.setstate(before)
        np.random.set_state(numbers)


@contextmanager
def offline(track: Track = iter) -> Iterator[None]:
    """Allow calls of lm-eval's generators in this block. The samples are the same every time.

    track: wraps the iteration over the indices of the samples, to show progress.
    """
    replaced = [
        (prepare_niah, "WORDS", words()),
        (prepare_niah, "cached_sent_tokenize", lru_cache(maxsize=16)(split_sentences)),
        (cwe_utils, "RNG", random.Random(SEED)),
        (vt_utils, "print", lambda *_: None),
    ]
    for module in (prepare_niah, cwe_utils, fwe_utils, vt_utils, qa_utils):
        replaced.append((module, "tqdm", _tracking(track)))
    with seeded(), ruler_uses(replaced):
        yield
