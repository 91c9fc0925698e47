"""Skipping in evaluation: the same texts with and without, through lm-eval."""

import json
import sys

import pytest

from eval.benchmarks.forward_skipping import main
from eval.benchmarks.skipping_times import SPARE, texts_of
from tests.eval.conftest import make_documents
from tests.eval.random_run import write_run


def call(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["forward_skipping", *map(str, arguments)])
    main()


@pytest.fixture
def texts(tmp_path):
    file = tmp_path / "texts.jsonl"
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in make_documents(6, 7)))
    return file


def test_a_table_and_a_file(tmp_path, config, groups, tokenizer, valid, texts, monkeypatch, capsys):
    """On a CPU nothing is skipped, so that both give the same bits per byte."""
    monkeypatch.setattr("lm_eval.evaluator.add_env_info", lambda *_: None)
    write_run(tmp_path / "run", config, "stickbreaking", groups, tokenizer, valid.tokenizer_file)
    call(monkeypatch, tmp_path / "run", "--texts", texts, "--lengths", "64,128", "--tokens", 600, "--repeats", 2)
    found = json.loads(next((tmp_path / "run" / "eval").glob("skipping-*.json")).read_text())
    assert {length: entry["texts"] for length, entry in found["lengths"].items()} == {"64": 10, "128": 5}
    for entry in found["lengths"].values():
        assert entry["bits_per_byte"]["with"] == entry["bits_per_byte"]["without"] > 0
        assert min(entry["seconds"].values()) > 0
    assert "| 128 | 5 |" in capsys.readouterr().out


def test_other_mixers_and_short_texts_are_refused(
    tmp_path, config, run, groups, tokenizer, valid, texts, monkeypatch, capsys
):
    write_run(tmp_path / "sb", config, "stickbreaking", groups, tokenizer, valid.tokenizer_file)
    for arguments, said in (
        ([run, "--texts", texts], "has no stick-breaking attention"),
        ([tmp_path / "sb", "--texts", texts, "--lengths", "999999"], "999,999 tokens exceed the"),
        ([tmp_path / "sb", "--texts", texts, "--lengths", "4"], "--lengths must be from 16"),
    ):
        with pytest.raises(SystemExit) as stop:
            call(monkeypatch, *arguments)
        assert stop.value.code == 2
        assert said in capsys.readouterr().err


def test_texts_have_their_length(tokenizer):
    tokens = tokenizer.encode(" ".join(make_documents(3, 4)))
    some = texts_of(tokens, 64, tokenizer)
    assert len(some) == len(tokens) // (64 - 1 - SPARE)
    assert all(len(tokenizer.encode(text)) <= 63 for text in some)
