"""Figures that need no model, against the definitions; what is missing is said with the command that makes it."""

import sys

import numpy as np
import pytest
import torch

from eval.figures import theory
from eval.figures.__main__ import main


def test_theory_is_softmax_and_ssmax():
    z = torch.from_numpy(theory.fading_vector(1000))
    assert theory.largest(z.numpy()) == pytest.approx(float(z.softmax(0).max()))
    assert theory.largest(z.numpy(), 0.43) == pytest.approx(
        float((1000.0 ** (0.43 * z) / (1000.0 ** (0.43 * z)).sum())[-1])
    )
    for s in (None, 0.5):
        vector = np.append(np.arange(9) / 8, 2.5)
        scaled = vector if s is None else s * np.log(10) * vector
        exact = np.exp(scaled[-1]) / np.exp(scaled).sum()
        assert theory.output_of_last(10, np.array([2.5]), s)[0] == pytest.approx(exact)


def call(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["figures", *map(str, arguments)])
    main()


def test_png_and_pdf(tmp_path, monkeypatch, capsys):
    call(monkeypatch, "fading", "--out", tmp_path / "deep" / "one")
    assert (tmp_path / "deep" / "one.png").read_bytes()[1:4] == b"PNG"
    assert (tmp_path / "deep" / "one.pdf").read_bytes()[:4] == b"%PDF"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["neddle_map"], "did you mean needle_map"),
        (["needle_map"], "python -m eval.needle"),
        (["needle_top", "."], "make them with `python -m eval.needle RUN --texts FILE.jsonl --scores`"),
        (["loss_by_position", "."], "make them with `python -m eval.long_context"),
        (["mqrar", "/nowhere"], "make them with `python -m eval.mqrar curve --out /nowhere`"),
        (["mqrar_attention", "/nowhere"], "python -m eval.mqrar picture"),
        (["fading", "x"], "takes no path"),
        (["extrapolation", "pyproject.toml"], "pyproject.toml cannot be read"),
    ],
)
def test_what_is_missing(arguments, said, monkeypatch, capsys):
    with pytest.raises(SystemExit) as stop:
        call(monkeypatch, *arguments)
    assert stop.value.code == 2
    message = capsys.readouterr().err
    assert said in message
    assert message.count("\n") == 1
