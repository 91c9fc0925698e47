"""Loss on long contexts: the windows, the losses against one piece at a time, files that are gone on with."""

import json
import math
import sys

import numpy as np
import pytest
import torch
import zstandard

from eval.checkpoint.documents import read_documents
from eval.papers.context_losses import cut_windows, losses, summarise
from eval.papers.figures import length as figures
from eval.papers.long_context import main, parse_lengths
from ssscale.errors import UserError
from ssscale.layout import PackedLayout
from tests.eval.conftest import make_documents


@pytest.fixture
def texts(tmp_path):
    file = tmp_path / "held_out.jsonl.zst"
    documents = [text * 2 for text in make_documents(6, 7)]
    lines = "".join(json.dumps({"text": text}) + "\n\n" for text in documents)
    file.write_bytes(zstandard.compress(lines.encode()))
    assert list(read_documents(file)) == documents
    return file


def test_windows_are_the_documents(texts, tokenizer):
    documents = [[tokenizer.bos_id, *tokenizer.encode(t), tokenizer.eos_id] for t in read_documents(texts)]
    every = cut_windows(read_documents(texts), tokenizer, 64, 10**6, join=False)
    assert len(every) == sum(len(document) // 64 for document in documents)
    parts = {tuple(document[i : i + 64]) for document in documents for i in range(0, len(document) - 63, 64)}
    assert {tuple(window) for window in every.tolist()} == parts
    first = [document[:64] for document in documents if len(document) >= 64]
    assert cut_windows(read_documents(texts), tokenizer, 64, len(first), join=False).tolist() == first
    joined = cut_windows(read_documents(texts), tokenizer, 64, 10**6, join=True)
    whole = [token for document in documents for token in document]
    assert joined.flatten().tolist() == whole[: len(whole) // 64 * 64]
    with pytest.raises(UserError, match="longer than the longest document"):
        cut_windows(read_documents(texts), tokenizer, 10**5, 1, join=False)


def test_losses_are_those_of_each_piece(texts, tokenizer, model):
    windows = cut_windows(read_documents(texts), tokenizer, 96, 3, join=True)
    found = losses(model, windows, 48, 16)
    assert np.isnan(found[:, ::16]).all()
    assert np.isfinite(np.delete(found, np.arange(0, 96, 16), 1)).all()
    piece = torch.from_numpy(windows[1, 48:])
    logits = model(piece, PackedLayout.from_lengths([48])).double()
    exact = -logits.log_softmax(-1)[:-1].gather(1, piece[1:, None])[:, 0].numpy()
    keep = np.arange(1, 48) % 16 != 0
    assert found[1, 49:][keep] == pytest.approx(exact[keep], abs=1e-5)
    result = summarise(found)
    assert result["mean"] == pytest.approx(np.nanmean(found.astype(float)))
    assert result["targets"] == 3 * 90
    assert np.array(result["losses"]).shape == (3, 48)


def call(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["long_context", *map(str, arguments)])
    main()


def test_command_and_figures(run, texts, tmp_path, monkeypatch, capsys, groups):
    call(monkeypatch, run, "--texts", texts, "--lengths", "32,64,256", "--windows", 2)
    call(
        monkeypatch, run, "--texts", texts, "--lengths", "32,64,256", "--windows", 2, "model.position.rope.base=500000"
    )
    plain = run / "eval" / "long_context-step-00000010.json"
    result = json.loads(plain.read_text())
    changed = json.loads((run / "eval" / "model.position.rope.base=500000" / plain.name).read_text())
    assert list(result["lengths"]) == ["32", "64", "256"]
    assert {found["targets"] for found in result["lengths"].values()} == {2 * (256 - 8)}
    assert not math.isclose(result["lengths"]["256"]["mean"], changed["lengths"]["256"]["mean"])
    call(monkeypatch, run, "--texts", texts, "--lengths", "32,64", "--windows", 2, "--articles")
    call(
        monkeypatch,
        run,
        "--texts",
        texts,
        "--lengths",
        "32,64",
        "--windows",
        2,
        "--articles",
        "model.position.rope.base=9",
    )
    articles = json.loads((run / "eval" / "articles-step-00000010.json").read_text())["lengths"]
    drawn = figures.of_articles([run]).axes[0].get_lines()[0].get_ydata()
    assert list(drawn) == [articles[length]["mean"] for length in ("32", "64")]
    for figure in (figures.by_position([run]), figures.by_context([run]), figures.of_articles([run])):
        assert len(figure.axes[0].get_legend_handles_labels()[1]) >= 2
        figure.savefig(tmp_path / "figure.png")
    # A file that lacks a length is gone on with; what is there stays as it is.
    result["lengths"]["32"]["mean"] = 99.0
    del result["lengths"]["256"]
    plain.write_text(json.dumps(result))
    call(monkeypatch, run, "--texts", texts, "--lengths", "32,64,256", "--windows", 2)
    again = json.loads(plain.read_text())
    assert again["lengths"]["32"]["mean"] == 99.0
    assert "256" in again["lengths"]
    call(monkeypatch, run, "--texts", texts, "--lengths", "32,64", "--windows", 2)
    assert json.loads(plain.read_text())["lengths"]["32"]["mean"] != 99.0


def test_another_text_of_the_same_name(run, texts, tmp_path, monkeypatch, capsys):
    """Its results are its own, and no figure compares them with those of the first."""
    other = tmp_path / "other" / texts.name
    other.parent.mkdir()
    lines = zstandard.decompress(texts.read_bytes()).splitlines(keepends=True)
    other.write_bytes(zstandard.compress(b"".join(reversed(lines))))
    results = []
    for file in (texts, other):
        call(monkeypatch, run, "--texts", file, "--lengths", "32,64", "--windows", 1)
        results.append(json.loads((run / "eval" / "long_context-step-00000010.json").read_text()))
    assert results[0]["lengths"]["64"]["mean"] != results[1]["lengths"]["64"]["mean"]
    with pytest.raises(UserError, match="do not compare: texts_sha256 is"):
        figures.check_same(results, 64)
    results[1] |= {"texts_sha256": results[0]["texts_sha256"]}
    results[1]["lengths"]["64"]["targets"] += 1
    with pytest.raises(UserError, match="do not compare: targets is 62 and 63 at 64 tokens"):
        figures.check_same(results, 64)


def test_too_long_for_the_memory(model, monkeypatch):
    def full(*inputs):
        raise torch.OutOfMemoryError

    monkeypatch.setattr(model, "forward", full)
    with pytest.raises(UserError, match="64 tokens in one pass do not fit"):
        losses(model, np.zeros((1, 64), np.int64), 64, 64)


@pytest.mark.parametrize("text", ["a", "1", "64,100", "48,64,192"])
def test_bad_lengths(text):
    with pytest.raises(UserError, match="--lengths"):
        parse_lengths(text)


def test_bad_input(run, texts, tmp_path, monkeypatch, capsys):
    broken = tmp_path / "broken.jsonl"
    broken.write_text('{"text": "a"}\n{"txt": "b"}\n')
    cases = (
        ([run, "--texts", tmp_path / "none"], "there is no such file"),
        ([run, "--texts", broken], "line 2, has no string with the key text or page"),
        ([tmp_path, "--texts", texts], "neither a checkpoint nor a run folder"),
        ([run, "--texts", texts, "--windows", 0], "--windows"),
        (["model.position.rope.base=9", "--texts", texts], "no run is given"),
        ([run, "model.positoin.rope.base=9", "--texts", texts], "keys to change begin with model.mixers"),
        ([run, tmp_path / "nowhere", "--texts", texts], "nowhere: there is no such folder"),
        ([run, *["model.position.rope.base=9"] * 2, "--texts", texts], "model.position.rope.base is given twice"),
        ([run, "--texts", texts], "--lengths=20000 is longer than the longest document"),
        ([run, "--texts", texts, "model.position.rope.scaling=dynamic_ntk"], "train_length"),
    )
    for arguments, said in cases:
        with pytest.raises(SystemExit) as stop:
            call(monkeypatch, *arguments)
        assert stop.value.code == 2
        assert said in capsys.readouterr().err
