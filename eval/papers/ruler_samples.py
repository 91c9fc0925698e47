"""Samples of RULER's kinds for fine-tuning. eval.papers.ruler_questions describes them."""

import math
import random
import signal
import string
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import pairwise
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import wonderwords

from data_prep.errors import DataError
from data_prep.tokenize import describe
from eval.checkpoint.documents import read_documents
from eval.checkpoint.ruler.offline import (
    cwe_utils,
    fwe_utils,
    niah_utils,
    prepare_niah,
    qa_utils,
    split_sentences,
    vt_utils,
)
from eval.checkpoint.text import TextTokenizer
from eval.papers.retrieval import CITIES
from ssscale.data.questions import Question, make_example, read_squad
from ssscale.errors import UserError

LEAST, FEWEST = 0.6, 512  # share of --length of the shortest sample; least --length
DOCUMENT_CHARS = 60_000  # of each document of --texts, for the haystacks
NOISE = prepare_niah.get_haystack("repeat")
GRASS = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again.\n"
HOPS = 4


@dataclass(frozen=True)
class Sources:
    """What samples are made from. texts: sentences of each document. questions: those of --squad."""

    tokenizer: TextTokenizer
    texts: list[list[str]]
    questions: list[Question]
    length: int

    @cached_property
    def words(self) -> dict[str, list[str]]:
        categories = wonderwords.RandomWord()._categories
        return {kind: sorted(set(categories[kind])) for kind in ("nouns", "adjectives")}

    @cached_property
    def rulers(self) -> tuple[frozenset[str], frozenset[str]]:
        """The first and the second words of RULER's keys."""
        return frozenset(self.words["adjectives"]), frozenset(self.words["nouns"])

    @cached_property
    def documents(self) -> list[str]:
        return sorted({question.context for question in self.questions})

    def tokens(self, question: Question) -> int:
        return len(make_example(question, self.tokenizer.encode, self.tokenizer.bos_id).tokens)

    def count(self, text: str) -> int:
        return len(self.tokenizer.encode(text))


Make = Callable[[Sources, random.Random, int], Question]


def of_ruler(key: str, rulers: tuple[frozenset[str], frozenset[str]]) -> bool:
    """Return whether RULER could draw the key, which is ADJECTIVE-NOUN there."""
    adjectives, nouns = rulers
    cuts = (index for index, letter in enumerate(key) if letter == "-")
    return any(key[:at] in adjectives and key[at + 1 :] in nouns for at in cuts)


def draw(kind: str, sources: Sources, rng: random.Random) -> str:
    """Draw a key or a value: `words`, `numbers` of seven digits, or `uuids`."""
    if kind == "numbers":
        return str(rng.randint(10**6, 10**7 - 1))
    if kind == "uuids":
        return str(uuid.UUID(int=rng.getrandbits(128), version=4))
    while True:
        key = f"{rng.choice(sources.words['nouns'])}-{rng.choice(sources.words['adjectives'])}"
        if not of_ruler(key, sources.rulers):
            return key


def fill(sources: Sources, unit: Callable[[], str], tokens: int) -> list[str]:
    """Return units of text that have about `tokens` tokens in all, at least one."""
    found: list[str] = []
    left = tokens
    while not found or left > 0:
        found.append(unit())
        left -= sources.count(found[-1]) + 1
    return found


def stretch(sources: Sources, rng: random.Random, tokens: int) -> list[str]:
    """Return successive sentences of a document from a random one on, of about `tokens` tokens."""
    document = rng.choice(sources.texts)
    sentence = rng.randrange(len(document))
    count = 0

    def following() -> str:
        nonlocal count
        count += 1
        return document[(sentence + count - 1) % len(document)]

    return fill(sources, following, tokens)


def scatter(units: list[str], needles: Sequence[str], rng: random.Random) -> list[str]:
    """Return the units with the needles between them, each at a random place, in their order."""
    places = sorted(rng.randint(0, len(units)) for _ in needles)
    found = list(units)
    for number, (place, needle) in enumerate(zip(places, needles, strict=True)):
        found.insert(place + number, needle)
    return found


def listed(items: Sequence[str]) -> str:
    return items[0] if len(items) == 1 else ", ".join(items[:-1]) + ", and " + items[-1]


def divided(template: str, **fields: str) -> tuple[str, str]:
    """Return what precedes and what follows {context} in one of RULER's templates, without the word Question."""
    before, _, after = template.partition("{context}")
    return before.format(**fields), after.format(**fields).strip().removeprefix("Question:").strip()


def needle(sources: Sources, rng: random.Random, tokens: int) -> Question:
    name = rng.choice(sources.words["nouns"]).capitalize()
    if name in CITIES:
        name += "ville"
    number = draw("numbers", sources, rng)
    units = stretch(sources, rng, tokens - 40)
    context = " ".join(scatter(units, [f"The special magic {name} number is: {number}."], rng))
    return Question(context, f"What is the special magic {name} number?", number)


def niah(sources: Sources, rng: random.Random, tokens: int) -> Question:
    haystack = rng.choice(("text", "text", "repeat", "needles"))
    keys_of = rng.choice(("words", "words", "uuids")) if haystack != "text" else "words"
    kind = rng.choice(("numbers", "numbers", "uuids"))
    num_keys, num_values, num_asked = rng.choice(((1, 1, 1), (1, 1, 1), (4, 1, 1), (1, 4, 1), (4, 1, 4)))

    def sentence(key: str, value: str) -> str:
        return str(prepare_niah.NEEDLE.format(type_needle_v=kind, key=key, value=value))

    def other() -> str:
        return sentence(draw(keys_of, sources, rng), draw(kind, sources, rng))

    values = {
        draw(keys_of, sources, rng): [draw(kind, sources, rng) for _ in range(num_values)] for _ in range(num_keys)
    }
    needles = [sentence(key, value) for key, some in values.items() for value in some]
    rng.shuffle(needles)
    asked = rng.sample(sorted(values), min(num_asked, len(values)))
    answers = [value for key in asked for value in values[key]]
    room = tokens - 110 - sum(map(sources.count, needles)) - 2 * sum(map(sources.count, [*asked, *answers]))
    if haystack == "text":
        units, between = stretch(sources, rng, room), " "
    else:
        units, between = fill(sources, other if haystack == "needles" else lambda: NOISE, room), "\n"
    template, one = niah_utils.TEMPLATE, len(answers) == 1
    if one:
        for plural, singular in (("Some", "A"), ("are all", "is"), ("are", "is")):
            template = template.replace(plural, singular)
    shown = kind[:-1] if one else kind
    before, question = divided(template, type_needle_v=shown, query=listed(asked))
    context = before + between.join(scatter(units, needles, rng))
    verb = "is" if one else "are"
    answer = f"The special magic {shown} for {listed(asked)} mentioned in the provided text {verb} {listed(answers)}"
    return Question(context, question, answer)


def vt(sources: Sources, rng: random.Random, tokens: int) -> Question:
    names = ["".join(rng.choices(string.ascii_uppercase, k=5)) for _ in range(HOPS + 1)]
    value = str(rng.randint(10_000, 99_999))
    chain = [f"VAR {names[0]} = {value}"]
    chain += [f"VAR {name} = VAR {before} " for before, name in pairwise(names)]
    units = fill(sources, lambda: GRASS, tokens - 150 - sum(map(sources.count, chain)))
    template = vt_utils.CONFIG["variable_tracking"]
    before, question = divided(template["template"], query=value)
    start = template["answer_prefix"].format(query=value, num_v=str(len(names))).strip().removeprefix("Answer:").strip()
    return Question(before + " ".join(scatter(units, chain, rng)), question, f"{start} {' '.join(names)}")


def cwe(sources: Sources, rng: random.Random, tokens: int) -> Question:
    words = [*sources.words["nouns"], *sources.words["adjectives"]]
    common = rng.sample(words, 10)
    often = sources.count(" 1000.") * 60 + 6 * sum(sources.count(f" {word}") for word in common)
    rest = fill(sources, lambda: f"{rng.choice(words)} 1000.", tokens - 130 - often)
    shuffled = [*(word.removesuffix(" 1000.") for word in rest), *(6 * common)]
    rng.shuffle(shuffled)
    before, question = divided(cwe_utils.CONFIG["template"])
    answer = cwe_utils.CONFIG["answer_prefix"].strip().removeprefix("Answer:").strip()
    top = " ".join(f"{number}. {word}" for number, word in enumerate(common, 1))
    return Question(
        before + " ".join(f"{n}. {word}" for n, word in enumerate(shuffled, 1)), question, f"{answer} {top}"
    )


def fwe(sources: Sources, rng: random.Random, tokens: int) -> Question:
    """The k-th word of a Zipf distribution with exponent 2 occurs a share 6 / (π² k²) of the times; the first is dots."""
    coded = ["".join(rng.choices(string.ascii_lowercase, k=6)) for _ in range(max(8, sources.length // 50))]
    coded[0] = "..."
    shares = [6 / (math.pi * rank) ** 2 for rank in range(1, len(coded) + 1)]
    each = sum(share * (sources.count(f" {word}")) for share, word in zip(shares, coded, strict=True))
    total = max(60, int((tokens - 110) / each))
    words = [word for word, share in zip(coded, shares, strict=True) for _ in range(int(total * share))]
    rng.shuffle(words)
    before, question = divided(fwe_utils.CONFIG["template"])
    answer = fwe_utils.CONFIG["answer_prefix"].strip().removeprefix("Answer:").strip()
    return Question(before + " ".join(words), question, f"{answer} {' '.join(coded[1:4])}")


def qa(sources: Sources, rng: random.Random, tokens: int) -> Question:
    asked = rng.choice(sources.questions)
    left = tokens - 90 - sources.count(f"{asked.context}{asked.question}{asked.answer}")
    documents = [asked.context]
    while left > 0 and len(documents) < len(sources.documents):
        document = rng.choice(sources.documents)
        left -= sources.count(document) + 6
        if left > 0 and document not in documents:
            documents.append(document)
    rng.shuffle(documents)
    before, after = divided(qa_utils.TEMPLATE, query="")
    numbered = "\n\n".join(qa_utils.DOCUMENT_PROMPT.format(i=i, document=text) for i, text in enumerate(documents, 1))
    again = after.partition("Question:")[0].strip()
    return Question(f"{before}{numbered}\n\n{again}", asked.question, asked.answer)


KINDS: dict[str, tuple[Make, int]] = {  # and how often each is made
    "needle": (needle, 2),
    "niah": (niah, 8),
    "vt": (vt, 1),
    "cwe": (cwe, 1),
    "fwe": (fwe, 1),
    "qa": (qa, 2),
}


def sample(sources: Sources, seed: int, index: int) -> tuple[str, Question]:
    """Return sample `index` and its kind. It has at most `sources.length` tokens."""
    rng = random.Random(f"{seed}/{index}")
    (kind,) = rng.choices([*KINDS], [weight for _, weight in KINDS.values()])
    target = round(sources.length * rng.uniform(LEAST, 1.0))
    for _ in range(50):
        found = KINDS[kind][0](sources, rng, target)
        over = sources.tokens(found) - sources.length
        if over <= 0:
            return kind, found
        target = round(0.95 * target) - over
    raise UserError(f"--length={sources.length} is too short for a sample of the kind {kind}")


_own: list[Sources] = []  # of a process


def _begin(sources: Sources) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the command gets it as well, and ends its processes
    _own[:] = [sources]


def _sample(seed: int, index: int) -> tuple[str, Question]:
    return sample(_own[0], seed, index)


def make(sources: Sources, samples: int, seed: int, about: dict[str, Any], workers: int = 1) -> dict[str, Any]:
    """Return the samples in SQuAD's form, the kinds as titles. The number of processes changes nothing.

    Raises UserError if a process ends early. multiprocessing.Pool would replace it forever if it cannot start.
    """
    if workers > 1:
        # Not "fork": a copy of a process with threads can inherit a lock that nobody releases.
        with ProcessPoolExecutor(workers, get_context("forkserver"), _begin, (sources,)) as pool:
            try:
                made = list(pool.map(partial(_sample, seed), range(samples), chunksize=64))
            except (BrokenProcessPool, BrokenPipeError) as error:  # the latter while it is sent the texts
                raise UserError(
                    f"--workers={workers}: a process ended early: it could not start, for the reason above, or it was "
                    "killed (out of memory?)"
                ) from error
    else:
        made = [sample(sources, seed, index) for index in range(samples)]
    articles = []
    for index, (kind, found) in enumerate(made):
        asked = {"id": str(index), "question": found.question, "answers": [{"text": found.answer}]}
        articles.append({"title": kind, "paragraphs": [{"context": found.context, "qas": [asked]}]})
    return {"version": "v2.0", "about": about, "data": articles}


def read_sources(texts: Sequence[Path], squad: Sequence[Path], tokenizer: Path, length: int) -> Sources:
    """Raises UserError for missing or broken files, and for a length that is too short."""
    if length < FEWEST:
        raise UserError(f"--length must be at least {FEWEST}, not {length}")
    try:
        info = describe(str(tokenizer))
    except DataError as error:
        raise UserError(str(error)) from error
    found = [split_sentences(text[:DOCUMENT_CHARS]) for file in texts for text in read_documents(file)]
    found = [document for document in found if document]
    if not found:
        raise UserError(f"--texts={','.join(map(str, texts))} has no text")
    questions = [question for file in squad for question in read_squad(file)]
    return Sources(TextTokenizer(str(tokenizer), info.bos_id, info.eos_id), found, questions, length)
