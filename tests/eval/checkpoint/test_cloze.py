import json
from collections import Counter

import pytest

from eval.checkpoint.cloze import CHOICES, MAX_WORDS, MIN_WORDS, MOST_OF_A_WORD, build_items, write_items
from eval.checkpoint.text import HeldOut, held_out
from ssscale.errors import UserError
from tests.eval.conftest import LENGTH


@pytest.fixture(scope="module")
def texts(valid, tokenizer):
    return list(held_out(valid, tokenizer))


@pytest.fixture(scope="module")
def items(texts, tokenizer):
    return build_items(texts, tokenizer, LENGTH)


def test_documents_are_put_together_again(texts, documents):
    # Documents are numbered through a source's files, the training ones first.
    first = {source: min(t.document for t in texts if t.source == source) for source in documents}
    exact = 0
    for text in texts:
        original = documents[text.source][text.document - first[text.source]]
        assert text.text in original
        exact += text.text == original
    assert exact >= 0.9 * sum(map(len, documents.values()))  # packing drops what fills no row


def test_items_hold_what_the_document_says(items, documents):
    assert len(items) >= 60
    every = {source: "\n\n".join(texts) for source, texts in documents.items()}
    for item in items:
        assert f"{item.context} {item.choices[item.answer]}" in every[item.source]
        assert MIN_WORDS <= len(item.context.split()) <= MAX_WORDS
        assert len({choice.lower() for choice in item.choices}) == CHOICES
    counts = Counter(item.choices[item.answer].lower() for item in items)
    assert max(counts.values()) <= MOST_OF_A_WORD
    assert set(Counter(item.answer for item in items)) == set(range(CHOICES))
    assert len({item.id for item in items}) == len(items)


def test_wrong_choices_are_answers_of_other_items(items):
    answers = {item.choices[item.answer] for item in items}
    assert all(choice in answers for item in items for choice in item.choices)


def test_items_fit_the_model(items, tokenizer):
    for item in items:
        for choice in item.choices:
            assert 1 + len(tokenizer.encode(f"{item.context} {choice}")) <= LENGTH


def test_the_same_items_each_time(items, texts, tokenizer, tmp_path):
    again = build_items(texts, tokenizer, LENGTH)
    assert again == items
    assert build_items(texts, tokenizer, LENGTH, seed=1) != items
    write_items(items, tmp_path / "sub" / "cloze.jsonl")
    lines = (tmp_path / "sub" / "cloze.jsonl").read_text().splitlines()
    assert [json.loads(line)["id"] for line in lines] == [item.id for item in items]


def test_too_little_text(tokenizer):
    with pytest.raises(UserError, match="found 0 passages"):
        build_items([HeldOut("notes", 0, 0, "too short")], tokenizer, LENGTH)


def test_count(texts, tokenizer):
    assert len(build_items(texts, tokenizer, LENGTH, count=20)) == 20
