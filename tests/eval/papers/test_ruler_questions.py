"""Questions of RULER's kinds for fine-tuning: they fit, they can be answered from the text, none is one of RULER's."""

import importlib.util
import json
import random
import re
import sys
from pathlib import Path

import pytest

from eval.checkpoint.ruler import TASKS
from eval.checkpoint.ruler.data import find_sources
from eval.checkpoint.ruler.offline import words
from eval.checkpoint.ruler.samples import Texts, counter_of, generate
from eval.papers import ruler_samples
from eval.papers.ruler_questions import main
from eval.papers.ruler_samples import KINDS, Sources, draw, make, of_ruler, read_sources, sample
from ssscale.data.questions import Question, make_example, read_squad
from ssscale.errors import UserError
from tests.eval.conftest import make_documents
from tests.eval.ruler_data import write_texts, write_tokenizer

LENGTH, SAMPLES = 1792, 40


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """RULER's texts in one folder; other texts, questions and a tokenizer for training beside it."""
    root = tmp_path_factory.mktemp("questions")
    write_texts(root / "eval")
    write_tokenizer(root / "tokenizer.json")
    (root / "train.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in make_documents(60, 21)))
    texts = [text[:300] for text in make_documents(90, 22) if len(text) > 300]
    asked = [{"question": f"Which {i}?", "answers": [{"text": text.split()[3]}]} for i, text in enumerate(texts)]
    paragraphs = [{"context": text, "qas": [one]} for text, one in zip(texts, asked, strict=True)]
    (root / "squad.json").write_text(json.dumps({"data": [{"paragraphs": paragraphs}]}))
    return {name: root / name for name in ("eval", "tokenizer.json", "train.jsonl", "squad.json")}


@pytest.fixture(scope="module")
def sources(files: dict[str, Path]) -> Sources:
    return read_sources([files["train.jsonl"]], [files["squad.json"]], files["tokenizer.json"], LENGTH)


@pytest.fixture(scope="module")
def samples(sources: Sources) -> list[tuple[str, Question]]:
    return [sample(sources, 1, index) for index in range(SAMPLES)]


def test_samples_fit_and_fill_the_length(samples, sources):
    sizes = [len(make_example(q, sources.tokenizer.encode, sources.tokenizer.bos_id).tokens) for _, q in samples]
    assert max(sizes) <= LENGTH
    assert sum(sizes) / len(sizes) > 0.6 * LENGTH
    assert {kind for kind, _ in samples} == set(KINDS)


def test_a_sample_that_is_too_long_is_made_again(sources, monkeypatch):
    asked = []

    def greedy(sources: Sources, rng: random.Random, tokens: int) -> Question:
        asked.append(tokens)
        return Question(" the" * tokens, "Which?", "the")

    monkeypatch.setattr(ruler_samples, "KINDS", {"greedy": (greedy, 1)})
    monkeypatch.setattr(ruler_samples, "LEAST", 1.0)
    _, found = sample(sources, 1, 0)
    assert len(asked) > 1
    assert asked[0] == LENGTH
    assert sources.tokens(found) <= LENGTH


def test_answers_are_in_the_text(samples):
    for kind, (context, question, answer) in samples:
        if kind in ("niah", "needle"):
            values = re.findall(r"\b(?:\d{7}|[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12})\b", answer)
            keys = re.findall(r"for (.*) mentioned", question)
            assert values
            assert all(context.count(value) == 1 for value in values)
            for key in re.split(", and |, ", keys[0]) if keys else []:
                assert f" for {key} is: " in context
        elif kind == "vt":
            names = answer.rpartition(": ")[2].split()
            (value,) = re.findall(r"value (\d{5}) in", question)
            assert f"VAR {names[0]} = {value}" in context
            assert all(f"VAR {b} = VAR {a}" in context for a, b in zip(names, names[1:], strict=False))
        elif kind in ("cwe", "fwe"):
            answers = re.sub(r"\d+\. ", "", answer.rpartition(": ")[2]).split()
            counted = {word: context.count(f" {word}") for word in answers}
            assert len(answers) == (10 if kind == "cwe" else 3) or kind == "cwe"  # some words are two
            assert min(counted.values()) >= (6 if kind == "cwe" else 2)
        else:
            assert answer in context


def test_no_sample_is_one_of_rulers(samples, files, sources):
    """No needle, no assignment, no numbered list, no question and no sentence of a haystack is in both."""
    found = find_sources(["essays", "squad", "hotpotqa"], str(files["eval"]), {})
    texts = Texts({name: file for name, (file, _) in found.items()})
    theirs = []
    for task in TASKS:
        docs = generate(task, LENGTH, 6, counter_of(task, sources.tokenizer.encode), texts)
        theirs += [doc["input"] for doc in docs]
    ours = [f"{context}\n{question}" for _, (context, question, _) in samples]

    def facts(prompts: list[str]) -> set[str]:
        every = "\n".join(prompts)
        needles = re.findall(r"One of the special magic \w+ for (.*?) is: ", every)
        asked = re.findall(r"Question: (Which.*)|\n(Which \d.*)", every)
        assigned = re.findall(r"VAR \w+ = \w+(?: \w+)?", every)
        lists = re.findall(r"\n1\. \w+ 2\. \w+ 3\. \w+", every)
        # Sentences of the made-up texts have nine words, as one of RULER's prompts.
        sentences = [s for s in re.split(r"(?<=\.)\s", every) if len(s.split()) == 9 and "In these words" not in s]
        return {*needles, *(a or b for a, b in asked), *assigned, *lists, *sentences}

    mine, rulers = facts(ours), facts(theirs)
    assert len(mine) > 500
    assert len(rulers) > 500
    assert mine & rulers == set()


def test_keys_are_never_rulers(sources):
    rng = random.Random(3)
    some = words()
    assert all(of_ruler(some[rng.randrange(len(some))], sources.rulers) for _ in range(300))
    assert not any(of_ruler(draw("words", sources, rng), sources.rulers) for _ in range(300))


def test_command_writes_what_finetune_reads(files, sources, tmp_path, monkeypatch, capsys):
    def call(out: Path, *more: object) -> None:
        options = ["--texts", files["train.jsonl"], "--squad", files["squad.json"], "--out", out]
        options += ["--tokenizer", files["tokenizer.json"], "--length", LENGTH, "--samples", 6, *more]
        monkeypatch.setattr(sys, "argv", ["ruler_questions", *map(str, options)])
        main()

    call(tmp_path / "a.json", "--workers", 1)
    call(tmp_path / "b.json", "--workers", 2)
    assert (tmp_path / "a.json").read_text() == (tmp_path / "b.json").read_text()
    assert read_squad(tmp_path / "a.json") == [sample(sources, 1, index)[1] for index in range(6)]
    call(tmp_path / "c.json", "--seed", 2, "--samples", 3)
    a, c = (json.loads((tmp_path / name).read_text()) for name in ("a.json", "c.json"))
    assert a["about"] == {"seed": 1, "length": LENGTH, "texts": ["train.jsonl"], "squad": ["squad.json"]}
    assert not {x["paragraphs"][0]["context"] for x in a["data"]} & {x["paragraphs"][0]["context"] for x in c["data"]}
    for bad, said in ((["--length", 100], "--length must be at least 512"), (["--samples", 0], "--samples must be")):
        with pytest.raises(SystemExit):
            call(tmp_path / "d.json", *bad)
        assert said in capsys.readouterr().err


@pytest.mark.parametrize("texts", [10, 10**6])
def test_processes_that_cannot_start_are_said(texts, tmp_path):
    """They were started again forever. texts: characters; the buffer of a pipe holds 65,536."""
    (tmp_path / "theirs.py").write_text("from eval.papers.ruler_samples import Sources\n\n\nclass Gone(Sources): ...\n")
    spec = importlib.util.spec_from_file_location("theirs", tmp_path / "theirs.py")
    sys.modules["theirs"] = theirs = importlib.util.module_from_spec(spec)  # which no other process finds
    spec.loader.exec_module(theirs)
    gone = theirs.Gone(None, [["a" * texts]], [], LENGTH)
    try:
        with pytest.raises(UserError, match="--workers=2: a process ended early: it could not start"):
            make(gone, 3, 1, {}, workers=2)
    finally:
        del sys.modules["theirs"]


def test_a_length_that_is_too_short_is_said(sources):
    short = Sources(sources.tokenizer, sources.texts, sources.questions, 60)
    with pytest.raises(UserError, match="--length=60 is too short for a sample of the kind"):
        sample(short, 1, 0)
    assert ruler_samples.FEWEST > 60
