"""Repeated passages: prompts by their rules, losses against one prompt at a time in float64, files and tables."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from eval.checkpoint.text import TextTokenizer
from eval.papers.before_after import tables
from eval.papers.figures import repeats as figures
from eval.papers.passages import CUE, MEASURED, PASSAGE, draw_prompt, read
from eval.papers.repeats import main
from eval.papers.retrieval import Haystack
from ssscale.errors import UserError
from ssscale.layout import PackedLayout
from ssscale.model.decoder import Decoder
from tests.eval.conftest import make_documents

BOS = 10**6


def numbered(tokens: int) -> Haystack:
    """A stream in which token i is i, and a sentence ends at every tenth."""
    haystack = object.__new__(Haystack)
    haystack.tokenizer = SimpleNamespace(bos_id=BOS)
    haystack.tokens, haystack.ends = np.arange(tokens), np.arange(tokens) % 10 == 9
    return haystack


@pytest.mark.parametrize("tokens", [400, 2000])
@pytest.mark.parametrize("depth", [0, 50, 100])
def test_prompts(tokens: int, depth: int) -> None:
    haystack = numbered(tokens)
    places = set()
    for sample in range(40):
        prompt = draw_prompt(haystack, 400, depth, sample)
        assert prompt == draw_prompt(haystack, 400, depth, sample)
        found, start = prompt.tokens, prompt.start
        assert start is not None
        assert len(found) == 400
        assert found[0] == BOS
        passage = found[-PASSAGE:]
        assert passage == list(range(passage[0], passage[0] + PASSAGE)) == found[start : start + PASSAGE]
        assert passage[0] % 10 == 0
        assert passage[-1] < tokens
        places.add(passage[0])
        text = found[1:start] + found[start + PASSAGE : -PASSAGE]
        assert len(text) == 400 - 1 - 2 * PASSAGE
        steps = sorted(set(np.diff(text).tolist()))
        assert steps in ([1], [1, PASSAGE + 1])  # the passage was cut out of it
        assert not set(text) & set(passage)
        assert depth == 0 or found[start - 1] % 10 == 9
        share = (start - 1) / len(text)
        assert depth / 100 - 10 / len(text) <= share <= depth / 100
        # Without the passage: the same end, after more of the same text.
        other = draw_prompt(haystack, 400, None, sample)
        assert other.start is None
        assert len(other.tokens) == 400
        assert other.tokens[-PASSAGE:] == passage
        assert other.tokens[1 + PASSAGE : -PASSAGE] == text
        assert not set(other.tokens[1:-PASSAGE]) & set(passage)
        assert draw_prompt(haystack, 300, depth, sample).tokens[-PASSAGE:] == passage
    assert len(places) > 5


def test_prompts_of_texts_that_are_too_short() -> None:
    with pytest.raises(UserError, match="leave no room"):
        draw_prompt(numbered(1000), 3 * PASSAGE, 50, 0)
    with pytest.raises(UserError, match="too many for the 399 tokens"):
        draw_prompt(numbered(399), 400, 50, 0)


def test_losses_are_those_of_one_prompt(model: Decoder, tokenizer: TextTokenizer, monkeypatch: Any) -> None:
    monkeypatch.setattr("eval.papers.passages.PASS_TOKENS", 600)  # two prompts per pass
    haystack = Haystack(iter(make_documents(12, 8)), tokenizer)
    prompts = [draw_prompt(haystack, 300, depth, 0).tokens for depth in (None, 10, 90)]
    losses, right = read(model, prompts)
    assert losses.shape == right.shape == (3, MEASURED)
    for prompt, found, hits in zip(prompts, losses, right, strict=True):
        logits = model(torch.tensor(prompt), PackedLayout.from_lengths([300])).double()
        targets = torch.tensor(prompt[-MEASURED:])
        exact = -logits[-MEASURED - 1 : -1].log_softmax(-1).gather(1, targets[:, None])[:, 0]
        assert found == pytest.approx(exact.numpy(), abs=1e-5)
        assert (hits == (logits[-MEASURED - 1 : -1].argmax(-1) == targets).numpy()).all()
    assert CUE + MEASURED == PASSAGE


def call(monkeypatch: Any, *arguments: Any) -> None:
    monkeypatch.setattr(sys, "argv", ["repeats", *map(str, arguments)])
    main()


def test_commands_figure_and_tables(run: Path, tmp_path: Path, monkeypatch: Any) -> None:
    from eval.papers import long_context

    texts = tmp_path / "books.txt"
    texts.write_text(" ".join(make_documents(10, 9)))
    sizes = ["--texts", texts, "--lengths", "200,400", "--depths", "20,80", "--samples", 2]
    call(monkeypatch, run, *sizes, "model.position.rope.base=500000")
    call(monkeypatch, run, *sizes)
    file = run / "eval" / "model.position.rope.base=500000" / "repeats-step-00000010.json"
    result = json.loads(file.read_text())
    keys = [(200, None), (200, 20), (200, 80), (400, None), (400, 20), (400, 80)]
    assert [(cell["length"], cell["depth"]) for cell in result["cells"]] == keys
    assert result["cells"] != json.loads((run / "eval" / file.name).read_text())["cells"]

    # What is there stays as it is, and what is missing is added. A length without all of its cells is not drawn.
    result["cells"] = [cell | {"loss": 5.0 - (cell["depth"] or 0) / 80} for cell in result["cells"][:4]]
    file.write_text(json.dumps(result))
    assert figures.by_length(result)[200]["saved"] == pytest.approx(0.625)
    assert list(figures.by_length(result)) == [200]
    call(monkeypatch, run, *sizes, "model.position.rope.base=500000")
    again = json.loads(file.read_text())
    assert again["cells"][:4] == result["cells"]
    assert [(cell["length"], cell["depth"]) for cell in again["cells"]] == keys
    figure = figures.gain([run])
    assert len(figure.axes[0].get_lines()) >= 3
    figure.savefig(tmp_path / "figure.png")

    monkeypatch.setattr(sys, "argv", ["long_context", str(run), "--texts", str(texts), "--lengths", "32,64", "--join"])
    long_context.main()
    losses, saved, _ = tables([run])
    mean = json.loads((run / "eval/long_context-step-00000010.json").read_text())["lengths"]["64"]["mean"]
    assert losses.splitlines()[0] == "| loss, nats per token | 32 | 64 |"
    assert any(line.endswith(f" | {mean:.3f} |") for line in losses.splitlines())
    plain, changed = saved.splitlines()[2:]
    assert "(" not in plain
    assert "(rope.base=500000) | 0.625 | " in changed


def test_bad_input(run: Path, tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    texts = tmp_path / "books.txt"
    texts.write_text(" ".join(make_documents(10, 9)))
    cases: tuple[tuple[list[Any], str], ...] = (
        (["--lengths", "100"], "leave no room"),
        (["--lengths", "900000"], "are too many for"),
        (["--depths", "101"], "--depths must be from 0 to 100"),
        (["--samples", "0"], "--samples must be at least 1, not 0"),
    )
    for arguments, said in cases:
        with pytest.raises(SystemExit) as stop:
            call(monkeypatch, run, "--texts", texts, *arguments)
        assert stop.value.code == 2
        assert said in capsys.readouterr().err
    with pytest.raises(UserError, match=r"has no repeats results: make them with `python -m eval\.papers\.repeats"):
        figures.gain([tmp_path])
