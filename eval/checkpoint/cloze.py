"""Items of the last-word cloze task, from the held-out documents of any data folder.

Context: 20 to 200 words of a document (fewer where the model's length ends first). The choices: the word that follows,
and three answers of other items of the same kind. As wrong choices are drawn from the answers themselves, a model that
knows nothing but how frequent words are gains next to nothing: chance is 1/4.
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
MIN_WORDS, MAX_WORDS = 20, 200  # of a context
RESERVED = 16  # tokens kept free for the choices
MOST_OF_A_WORD = 5  # items with the same answer: code would be all `self` and `return`
# An answer follows one space, so that it is tokenized as a word, and is no part of an identifier.
ANSWER = re.compile(r"(?<=\S )[A-Za-z][a-z]{3,11}(?=[\s.,;:!?)]|$)")
ENDINGS = re.compile(r"(?:ing|ed|ly|tion|er|s)$")


@dataclass(frozen=True)
class Item:
    """choices[answer] is the word that followed the context in the document."""

    id: str
    source: str
    context: str
    choices: list[str]
    answer: int


def build_items(
    documents: Iterable[HeldOut], tokenizer: TextTokenizer, length: int, count: int = NUM_ITEMS, seed: int = 0
) -> list[Item]:
    """`count` items, or as many as the documents give, for a model that takes `length` tokens; the same ones each time.

    Passages do not overlap. Raises UserError where there are fewer than FEWEST_ITEMS.
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
            f"the cloze task found {len(kept)} passages in the validation split, and needs {FEWEST_ITEMS} at least: "
            "hold more or longer documents out, or pack longer rows"
        )
    return _with_choices(sorted(kept, key=lambda item: item.id), seed)


def _passages(document: HeldOut, tokenizer: TextTokenizer, max_tokens: int, seed: int) -> Iterator[Item]:
    """Passages of one document, each with its answer as the only choice yet."""
    rng = random.Random(f"{seed} {document.source} {document.document} {document.offset}")
    words = [match.start() for match in re.finditer(r"\S+", document.text)]
    answers = {match.start(): match.group() for match in ANSWER.finditer(document.text)}
    first = 0
    while first + MIN_WORDS < len(words):
        # Even over the logarithm: many short passages, some long ones.
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
    """The end of a context that takes at most max_tokens tokens with BOS, from the beginning of a word on."""
    while len(tokens := tokenizer.encode(context)) >= max_tokens:
        cut = max(1, len(context) * (len(tokens) - max_tokens) // len(tokens))
        space = re.search(r"\s\S", context[cut:])
        if space is None:
            return ""
        context = context[cut + space.start() + 1 :]
    return context


def _kind(item: Item) -> tuple[str, bool, str]:
    """Source, capital or small initial, and ending, which in English goes with the part of speech."""
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
        # A kind with too few words is filled up from all of them.
        for pool in (answers[_kind(item)], everything):
            others = rng.sample(pool, len(pool))
            for other in others:
                if len(wrong) < CHOICES - 1 and other.lower() not in {word.lower(), *(w.lower() for w in wrong)}:
                    wrong.append(other)
        choices = rng.sample([word, *wrong], CHOICES)
        complete.append(replace(item, choices=choices, answer=choices.index(word)))
    return complete


def write_items(items: list[Item], file: Path) -> None:
    """As JSON lines."""
    file.parent.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(asdict(item), ensure_ascii=False) + "\n" for item in items]
    file.write_text("".join(lines), encoding="utf-8")
