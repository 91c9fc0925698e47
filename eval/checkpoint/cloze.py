"""Builds items of the last-word cloze task from the held-out documents of any data folder.

The context of an item is 20 to 200 words of a document, or fewer if the model's length is too short for them. The
choices are the word that follows the context and the answers of three other items of the same kind. Wrong choices are
themselves answers of other items, so word frequency alone gives a model almost no advantage. Chance is 1/4.
"""

import json
import math
import random
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from eval.checkpoint.text import HeldOut, TextTokenizer
from ssscale.errors import UserError

CHOICES = 4
NUM_ITEMS = 400
FEWEST_ITEMS = 8
MIN_WORDS, MAX_WORDS = 20, 200  # words of a context
RESERVED = 16  # tokens reserved for the choices
MOST_OF_A_WORD = 5  # items with the same answer. Without this limit, most answers in code are `self` and `return`.
# An answer follows exactly one space, so that it is tokenized as a word. It is not a part of an identifier.
ANSWER = re.compile(r"(?<=\S )[A-Za-z][a-z]{3,11}(?=[\s.,;:!?)]|$)")
ENDINGS = re.compile(r"(?:ing|ed|ly|tion|er|s)$")


@dataclass(frozen=True)
class Item:
    """One question. choices[answer] is the word that follows the context in the document."""

    id: str
    source: str
    context: str
    choices: list[str]
    answer: int


def build_items(
    documents: Iterable[HeldOut], tokenizer: TextTokenizer, length: int, count: int = NUM_ITEMS, seed: int = 0
) -> list[Item]:
    """Return up to `count` items for a model that takes `length` tokens. The same arguments give the same items.

    Passages do not overlap. Raises UserError if the documents give fewer than FEWEST_ITEMS items, or fewer than CHOICES
    different answers.
    """
    found = [item for document in documents for item in _passages(document, tokenizer, length - RESERVED, seed)]
    random.Random(f"{seed} items").shuffle(found)
    taken: Counter[str] = Counter()
    kept: list[Item] = []
    for item in found:
        word = item.choices[0].lower()
        if taken[word] < MOST_OF_A_WORD and len(kept) < count:
            taken[word] += 1
            kept.append(item)
    if len(kept) < FEWEST_ITEMS or len(taken) < CHOICES:
        raise UserError(
            f"the cloze task found {len(kept)} passages in the validation split but needs at least {FEWEST_ITEMS}; "
            "hold out more or longer documents, or pack longer rows"
        )
    return _with_choices(sorted(kept, key=lambda item: item.id), seed)


def _passages(document: HeldOut, tokenizer: TextTokenizer, max_tokens: int, seed: int) -> Iterator[Item]:
    """Yield the passages of one document. At this stage the answer is the only choice."""
    rng = random.Random(f"{seed} {document.source} {document.document} {document.offset}")
    words = [match.start() for match in re.finditer(r"\S+", document.text)]
    answers = {match.start(): match.group() for match in ANSWER.finditer(document.text)}
    first = 0
    while first + MIN_WORDS < len(words):
        # Uniform in the logarithm: many short passages, some long ones.
        wanted = round(math.exp(rng.uniform(math.log(MIN_WORDS), math.log(MAX_WORDS))))
        after = next((i for i in range(first + wanted, len(words)) if words[i] in answers), None)
        if after is None:
            return
        start = max(first, after - MAX_WORDS)
        context = _fitting(document.text[words[start] : words[after] - 1], tokenizer, max_tokens)
        if len(context.split()) >= MIN_WORDS and "\ufffd" not in context:
            name = f"{document.source}-{document.document:06d}-{document.offset:08d}-{words[after]:08d}"
            yield Item(name, document.source, context, [answers[words[after]]], 0)
        first = after + 1


def _fitting(context: str, tokenizer: TextTokenizer, max_tokens: int) -> str:
    """Return the longest end of a context that starts at a word and has at most max_tokens tokens, BOS included.

    The result is approximate: words are cut from the front in proportion to the excess tokens.
    """
    while len(tokens := tokenizer.encode(context)) >= max_tokens:
        cut = max(1, len(context) * (len(tokens) - max_tokens) // len(tokens))
        space = re.search(r"\s\S", context[cut:])
        if space is None:
            return ""
        context = context[cut + space.start() + 1 :]
    return context


def _kind(item: Item) -> tuple[str, bool, str]:
    """Return (source, whether the initial is a capital, ending). English endings indicate the part of speech."""
    word = item.choices[0]
    ending = ENDINGS.search(word)
    return item.source, word[0].isupper(), ending.group() if ending else ""


def _with_choices(items: list[Item], seed: int) -> list[Item]:
    answers: dict[tuple[str, bool, str], list[str]] = defaultdict(list)
    for item in items:
        answers[_kind(item)].append(item.choices[0])
    everything = [item.choices[0] for item in items]
    complete = []
    for item in items:
        rng = random.Random(f"{seed} {item.id}")
        word = item.choices[0]
        wrong: list[str] = []
        # If a kind has too few words, words of all kinds are added.
        for pool in (answers[_kind(item)], everything):
            others = rng.sample(pool, len(pool))
            for other in others:
                if len(wrong) < CHOICES - 1 and other.lower() not in {word.lower(), *(w.lower() for w in wrong)}:
                    wrong.append(other)
        choices = rng.sample([word, *wrong], CHOICES)
        complete.append(replace(item, choices=choices, answer=choices.index(word)))
    return complete


def write_items(items: list[Item], file: Path) -> None:
    """Write the items to a file as JSON lines."""
    file.parent.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(asdict(item), ensure_ascii=False) + "\n" for item in items]
    file.write_text("".join(lines), encoding="utf-8")
