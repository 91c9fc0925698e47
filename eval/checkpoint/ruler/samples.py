"""Makes RULER samples (arXiv:2404.06654) with lm-eval's generators, from local texts and with our tokenizer.

A length counts all tokens: BOS, the prompt with the beginning of its answer, and the tokens to generate. lm-eval
counts neither BOS, nor the beginnings of answers in NIAH and QA, nor the new tokens in FWE. So its samples may exceed
the length.
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
SAMPLES = 500  # per task and length, as in RULER
FWE_TOKENS = fwe_utils.CONFIG["tokens_to_generate"]
SPARE = 64  # tokens by which one random draw of a sample may exceed another

NUMBERS = {"type_needle_k": "words", "type_needle_v": "numbers"}
# The arguments that lm-eval's functions of these names pass to its generator.
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
NAME_TOKENS = 3  # by which a name of VT's example may grow: its three letters are drawn again for each sample


class Counted(NamedTuple):
    input_ids: range


class Counter:
    """Replaces the tokenizer in lm-eval's generators, which use only the length of input_ids.

    encode: returns the tokens of a text.
    whole: returns the final prompt that is made from a text.
    extra: further tokens that must fit.
    """

    def __init__(self, encode: Callable[[str], list[int]], whole: Callable[[str], str] = str, extra: int = 0) -> None:
        self.encode, self.whole, self.extra = encode, whole, extra

    def __call__(self, text: str) -> Counted:
        return Counted(range(len(self.encode(self.whole(text))) + self.extra))

    def count(self, text: str) -> int:
        return len(self(text).input_ids)


def niah_prompt(text: str) -> str:
    """Return the text followed by the beginning of the answer, which is made from the question."""
    found = NIAH_QUESTION.match(text, text.rindex("\nWhat "))
    assert found, text[-300:]
    return f"{text} The {found[2]} {found[1]}"


def counter_of(task: str, encode: Callable[[str], list[int]]) -> Counter:
    """Return a counter of all tokens that a model must take for a task.

    VT, CWE and FWE count 2 more, because the prompt joins texts with other white space than the generator.
    """
    if task in NIAH:
        return Counter(encode, niah_prompt, 1)
    if task in QUESTIONS:
        return Counter(encode, lambda text: f"{text} Answer:", 1)
    if task == "ruler_fwe":
        return Counter(encode, extra=3 + FWE_TOKENS)
    return Counter(encode, extra=3)


@dataclass
class Texts:
    """The source texts of the samples, read on first use. files: paths by the names of `data.ORIGINS`."""

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
    """Return the names of the texts in `data.ORIGINS` that the tasks need."""
    names = ["essays" if NIAH.get(task, {}).get("type_haystack") == "essay" else QUESTIONS.get(task) for task in tasks]
    return list(dict.fromkeys(name for name in names if name))


def least_tokens(task: str, length: int, counter: Counter, texts: Texts) -> int:
    """Return the tokens of the shortest sample that lm-eval can make: one with the first increment of its search.

    At smaller lengths, lm-eval's loops make samples without a text around the needle, or never end.
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
            # Of n words, the third most frequent must be more frequent than the fourth. int(0.038 n) > int(0.0243 n)
            # holds for n ≥ 53. The generator shortens n in steps of length // 32.
            words = ["".join(random.choices(string.ascii_lowercase, k=6)) for _ in range(53 + length // 32)]
            coded = " ".join("..." if index % 5 < 3 else word for index, word in enumerate(words))
            return max(counter.count(fwe_utils.TEMPLATE.format(context=coded, query="")), 250)
        questions, documents = texts.questions(task)
        number = max(10, len(questions[0]["context"]))
        text, answers = qa_utils.generate_input_output(0, number, questions, documents)
        return counter.count(f"{text} {answers}") + 32


def has_enough(task: str, length: int, counter: Counter, texts: Texts) -> bool:
    """Return whether the texts are long enough for a sample of the length."""
    if task in QUESTIONS:
        # Ten more documents: lm-eval's generator adds ten at a time, and loses count if it takes all documents.
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
    """Return VT's example with its answer, as it precedes each sample."""
    return f"{example['input']} {' '.join(example['outputs'])}\n\n"


def vt_example(counter: Counter) -> Doc:
    """Return the solved example that precedes each sample of VT. It has at most 500 tokens if this is possible."""
    with offline():
        text, answers = vt_utils.generate_input_output(5, 1, 4, is_icl=True)
        room = max(500, counter.count(f"{text} {answers}") + 30 + SPARE)
    return dict(vt_utils.sys_vartrack_w_noise_random(counter, 1, room, incremental=5)[0])


def vt_counter(counter: Counter, example: Doc) -> Counter:
    """Return a counter with room for growing names in VT's example.

    lm-eval counts the example and the rest separately, so each count gets half of the room. A counter without extra
    tokens is returned unchanged.
    """
    if not counter.extra:
        return counter
    names = sum(example["input"].count(name) + 1 for name in example["outputs"])
    return Counter(counter.encode, counter.whole, (counter.extra + NAME_TOKENS * names + 1) // 2)


def generate(task: str, length: int, number: int, counter: Counter, texts: Texts, track: Track = iter) -> list[Doc]:
    """Make `number` samples with lm-eval's generators, measured by `counter`.

    There are fewer samples if there are fewer questions, or if documents are longer than `length` tokens. Raises
    UserError if there is no sample.
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
                doc["length"] -= min(counter.extra, FWE_TOKENS)  # the generator adds them a second time
            return docs
        questions, documents = texts.questions(task)
        number = min(number, len(questions))
        try:
            return list(qa_utils.generate_samples(counter, documents, questions, length, number))
        except ValueError as error:
            raise UserError(f"lengths={length}: {task}: {error}") from None


def check(tasks: list[str], lengths: list[int], encode: Callable[[str], list[int]], texts: Texts) -> None:
    """Raise one UserError that names all lengths at which tasks cannot be made."""
    few: dict[int, dict[str, int]] = {}
    for length in lengths:
        for task in tasks:
            counter = counter_of(task, encode)
            if not has_enough(task, length, counter, texts):
                (name,) = needed([task])
                raise UserError(f"lengths={length}: {texts.files[name]} has less text than that, but {task} needs it")
            least = least_tokens(task, length, counter, texts)
            if least > length:
                few.setdefault(length, {})[task] = least
    if few:
        cells = "; ".join(
            f"{length}: " + ", ".join(f"{task} ({least:,})" for task, least in found.items())
            for length, found in few.items()
        )
        raise UserError(f"lengths are too short with this tokenizer for {cells}; the minimum is in brackets")
