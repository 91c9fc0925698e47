"""RULER's samples (arXiv:2404.06654): lm-eval's own, made from local texts and measured with our tokenizer.

A length is the tokens of everything: BOS, the prompt with the beginning of its answer, the tokens that are generated. lm-eval
counts neither BOS nor what NIAH's and QA's answers begin with nor FWE's new tokens: its samples may be longer than it says.
"""

import random
import re
import string
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from eval.checkpoint.ruler.data import Questions, read_essays, read_questions
from eval.checkpoint.ruler.offline import (
    Track,
    cwe_utils,
    fwe_utils,
    niah_utils,
    offline,
    prepare_niah,
    qa_utils,
    vt_utils,
)
from ssscale.errors import UserError

Doc = dict[str, Any]
SAMPLES = 500  # of a task and a length, as in RULER
FWE_TOKENS = fwe_utils.CONFIG["tokens_to_generate"]
SPARE = 64  # tokens by which one drawing of a sample may exceed another

NUMBERS = {"type_needle_k": "words", "type_needle_v": "numbers"}
# What lm-eval's functions of these names give to its generator.
NIAH: dict[str, dict[str, Any]] = {
    "niah_single_1": {"type_haystack": "repeat", **NUMBERS},
    "niah_single_2": {"type_haystack": "essay", **NUMBERS},
    "niah_single_3": {"type_haystack": "essay", "type_needle_k": "words", "type_needle_v": "uuids"},
    "niah_multikey_1": {"type_haystack": "essay", "num_needle_k": 4, **NUMBERS},
    "niah_multikey_2": {"type_haystack": "needle", **NUMBERS},
    "niah_multikey_3": {"type_haystack": "needle", "type_needle_k": "uuids", "type_needle_v": "uuids"},
    "niah_multiquery": {"type_haystack": "essay", "num_needle_q": 4, **NUMBERS},
    "niah_multivalue": {"type_haystack": "essay", "num_needle_v": 4, **NUMBERS},
}
QUESTIONS = {"ruler_qa_squad": "squad", "ruler_qa_hotpot": "hotpotqa"}

NIAH_QUESTION = re.compile(r"\nWhat (is|are)(?: all)? the (special magic .* mentioned in the provided text)\?")
NAME_TOKENS = 3  # by which a name of VT's example may grow: its three letters are drawn anew for each sample


class Counted(NamedTuple):
    input_ids: range


class Counter:
    """What lm-eval's generators take for a tokenizer: they ask for the length of input_ids only.

    encode: the tokens of a text. whole: the prompt that a text is going to be. extra: further tokens that must fit.
    """

    def __init__(self, encode: Callable[[str], list[int]], whole: Callable[[str], str] = str, extra: int = 0) -> None:
        self.encode, self.whole, self.extra = encode, whole, extra

    def __call__(self, text: str) -> Counted:
        return Counted(range(len(self.encode(self.whole(text))) + self.extra))

    def count(self, text: str) -> int:
        return len(self(text).input_ids)


def niah_prompt(text: str) -> str:
    """With the beginning of the answer, which is made from the question."""
    found = NIAH_QUESTION.match(text, text.rindex("\nWhat "))
    assert found, text[-300:]
    return f"{text} The {found[2]} {found[1]}"


def counter_of(task: str, encode: Callable[[str], list[int]]) -> Counter:
    """Counts all that a model is to take. 2 more where texts are joined with other white space than the generator has."""
    if task in NIAH:
        return Counter(encode, niah_prompt, 1)
    if task in QUESTIONS:
        return Counter(encode, lambda text: f"{text} Answer:", 1)
    if task == "ruler_fwe":
        return Counter(encode, extra=3 + FWE_TOKENS)
    return Counter(encode, extra=3)


@dataclass
class Texts:
    """What the samples are made from; files: by the names of eval/checkpoint/ruler/data.py. Read when they are needed."""

    files: dict[str, Path]

    @cached_property
    def essays(self) -> list[str]:
        return read_essays(self.files["essays"])

    @cached_property
    def squad(self) -> Questions:
        return read_questions(self.files["squad"])

    @cached_property
    def hotpotqa(self) -> Questions:
        return read_questions(self.files["hotpotqa"])

    def questions(self, task: str) -> Questions:
        return self.squad if task == "ruler_qa_squad" else self.hotpotqa

    def haystack(self, kind: str) -> list[str] | str:
        return self.essays if kind == "essay" else prepare_niah.get_haystack(kind)


def needed(tasks: Iterable[str]) -> list[str]:
    """The names of eval/checkpoint/ruler/data.py that tasks are made from."""
    names = ["essays" if NIAH.get(task, {}).get("type_haystack") == "essay" else QUESTIONS.get(task) for task in tasks]
    return list(dict.fromkeys(name for name in names if name))


def least_tokens(task: str, length: int, counter: Counter, texts: Texts) -> int:
    """What the shortest sample takes that lm-eval makes of a length: with the first step of what it lengthens samples by.

    Below that, its loops make samples without a text around the needle, or never end.
    """
    with offline():
        if task in NIAH:
            options = {"num_needle_k": 1, "num_needle_v": 1, "num_needle_q": 1, **NIAH[task]}
            options["num_needle_k"] = max(options["num_needle_k"], options["num_needle_q"])
            kind = options["type_haystack"]
            units = 500 if kind == "essay" else 5 if length < 4096 else 25
            text, answers, _ = prepare_niah.generate_input_output(
                units, texts.haystack(kind), template=niah_utils.TEMPLATE, **options
            )
            return counter.count(f"{text}{' '.join(answers)}") + 128 + SPARE
        if task == "ruler_vt":
            example = vt_example(counter)
            text, answers = vt_utils.generate_input_output(10, 1, 4)
            counter = vt_counter(counter, example)
            return counter.count(f"{text} {answers}") + counter.count(full(example)) + 30 + SPARE
        if task == "ruler_cwe":
            example, text, answers = cwe_utils.generate_input_output(20, length)
            numbered = " ".join(f"{i}. {word}" for i, word in enumerate(answers, 1))
            return counter.count(f"{example}\n{text} {numbered}") + 120 + SPARE
        if task == "ruler_fwe":
            # Of n words the third that is asked for must be more frequent than the next: int(0.038 n) > int(0.0243 n)
            # from 53 on. n is shortened by steps of length // 32.
            words = ["".join(random.choices(string.ascii_lowercase, k=6)) for _ in range(53 + length // 32)]
            coded = " ".join("..." if index % 5 < 3 else word for index, word in enumerate(words))
            return max(counter.count(fwe_utils.TEMPLATE.format(context=coded, query="")), 250)
        questions, documents = texts.questions(task)
        number = max(10, len(questions[0]["context"]))
        text, answers = qa_utils.generate_input_output(0, number, questions, documents)
        return counter.count(f"{text} {answers}") + 32


def has_enough(task: str, length: int, counter: Counter, texts: Texts) -> bool:
    """Whether the texts hold a sample of the length."""
    if task in QUESTIONS:
        # Ten more: lm-eval's generator, which adds ten at a time, loses their numbers where it takes all documents.
        total = longest = 0
        for document in texts.questions(task)[1]:
            size = counter.count(document)
            total, longest = total + size, max(longest, size)
            if total - 10 * longest > length:
                return True
        return False
    if task in NIAH and NIAH[task]["type_haystack"] == "essay":
        return len(counter.encode(" ".join(texts.essays[:length]))) >= length
    return True


def full(example: Doc) -> str:
    """VT's example with its answer, as it stands before each sample."""
    return f"{example['input']} {' '.join(example['outputs'])}\n\n"


def vt_example(counter: Counter) -> Doc:
    """The solved example before each of VT's samples: of 500 tokens at most, or as few as the tokenizer makes it."""
    with offline():
        text, answers = vt_utils.generate_input_output(5, 1, 4, is_icl=True)
        room = max(500, counter.count(f"{text} {answers}") + 30 + SPARE)
    return dict(vt_utils.sys_vartrack_w_noise_random(counter, 1, room, incremental=5)[0])


def vt_counter(counter: Counter, example: Doc) -> Counter:
    """With room for the example's names, half of it at the example's count and half at the rest's. A plain one stays."""
    if not counter.extra:
        return counter
    names = sum(example["input"].count(name) + 1 for name in example["outputs"])
    return Counter(counter.encode, counter.whole, (counter.extra + NAME_TOKENS * names + 1) // 2)


def generate(task: str, length: int, number: int, counter: Counter, texts: Texts, track: Track = iter) -> list[Doc]:
    """lm-eval's samples, measured by `counter`; fewer where questions are fewer, or their documents longer than `length`.

    Raises UserError where there is none.
    """
    with offline(track):
        if task in NIAH:
            kind = NIAH[task]["type_haystack"]
            return list(
                prepare_niah.generate_samples(
                    texts.haystack(kind),
                    counter,
                    max_seq_length=length,
                    template=niah_utils.TEMPLATE,
                    num_samples=number,
                    **NIAH[task],
                )
            )
        if task == "ruler_vt":
            example = vt_example(counter)
            counter = vt_counter(counter, example)
            return list(vt_utils.sys_vartrack_w_noise_random(counter, number, length, icl_example=example))
        if task == "ruler_cwe":
            return list(cwe_utils.sys_word_pair_random(number, length, counter))
        if task == "ruler_fwe":
            docs = list(fwe_utils.sys_kwext(counter, length, number))
            for doc in docs:
                doc["length"] -= min(counter.extra, FWE_TOKENS)  # which it adds once more
            return docs
        questions, documents = texts.questions(task)
        number = min(number, len(questions))
        try:
            return list(qa_utils.generate_samples(counter, documents, questions, length, number))
        except ValueError as error:
            raise UserError(f"lengths={length}: {task}: {error}") from None


def check(tasks: list[str], lengths: list[int], encode: Callable[[str], list[int]], texts: Texts) -> None:
    """Raises UserError for lengths that tasks cannot be made in, all at once."""
    few: dict[int, dict[str, int]] = {}
    for length in lengths:
        for task in tasks:
            counter = counter_of(task, encode)
            if not has_enough(task, length, counter, texts):
                (name,) = needed([task])
                raise UserError(f"lengths={length}: {texts.files[name]} holds less text than that, and {task} needs it")
            least = least_tokens(task, length, counter, texts)
            if least > length:
                few.setdefault(length, {})[task] = least
    if few:
        cells = "; ".join(
            f"{length}: " + ", ".join(f"{task} ({least:,})" for task, least in found.items())
            for length, found in few.items()
        )
        raise UserError(f"lengths are too short with this tokenizer for {cells}; in brackets what they take at least")
