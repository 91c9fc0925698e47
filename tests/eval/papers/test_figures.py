"""Figures that need no model, against the definitions; what is missing is said with the command that makes it."""

import json
import sys

import numpy as np
import pytest
import torch

from eval.papers.figures import ruler, theory, training
from eval.papers.figures.__main__ import main
from ssscale.config import load_config, to_yaml


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


def test_training_losses(tmp_path, monkeypatch):
    """The lower panel has the difference of the same steps; its label the mean of the last tenth."""
    config = to_yaml(load_config(["config=tiny_ssmax"]))
    for name, apart, every in (("a", 0.0, 1), ("b", -0.25, 2)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.yaml").write_text(config)
        same = {"stage": "stable", "lr": 1e-3, "tokens_per_second": 1.0}
        records = [{"step": i, "tokens": 100 * i, "loss": 9 / i + apart} | same for i in range(every, 41, every)]
        (tmp_path / name / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    figure = training.losses([tmp_path / "a", tmp_path / "b"])
    below = figure.axes[1]
    assert below.get_lines()[0].get_xdata().tolist() == [200 * i for i in range(1, 21)]
    assert below.get_lines()[0].get_ydata() == pytest.approx([-0.25] * 20)
    assert [text.get_text() for text in below.get_legend().get_texts()] == ["b: -0.2500 over the last 10%"]
    call(monkeypatch, "training_losses", tmp_path / "b", tmp_path / "a", "--out", tmp_path / "both")
    assert (tmp_path / "both.png").stat().st_size > 10_000


def ruler_results(file, cells, **more):
    tasks = {
        name: {"metric": "string_match", "value": v, "stderr": e, "chance": 0.0, "items": 9} for name, (v, e) in cells
    }
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps({"tasks": tasks | more}))


def test_ruler(tmp_path, monkeypatch):
    """The means of each panel with their intervals. Evaluations with other keys are curves of their own."""
    cells = [
        (f"{task}@{n}", (n / 8192, 0.1))
        for n in (2048, 4096)
        for task in ("niah_single_1", "niah_single_2", "ruler_vt")
    ]
    ruler_results(tmp_path / "a" / "eval" / "step-00000002.json", [*cells, ("ruler_fwe@2048", (1.0, None))], piqa={})
    ruler_results(tmp_path / "a" / "eval" / "limit=5" / "step-00000002.json", cells[:1])
    (tmp_path / "a" / "eval" / "cloze-step-1.json").write_text("{}")
    assert ruler.by_length(dict(cells), "all") == {
        n: pytest.approx((n / 8192, 1.959964 * 0.1 / 3**0.5)) for n in (2048, 4096)
    }
    found = ruler.results_of([tmp_path / "a"])
    assert {*found} == {"a", "a (limit=5)"}
    assert ruler.by_length(found["a"], "all") == {2048: pytest.approx((0.4375, 1.959964 * 0.1 * 3**0.5 / 4))}
    assert ruler.by_length(found["a"], "tracking")[4096][0] == 0.5
    call(monkeypatch, "ruler", tmp_path / "a", "--out", tmp_path / "ruler")
    assert (tmp_path / "ruler.png").stat().st_size > 10_000


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["ruler"], "python launch/evaluate.py checkpoint=RUN suite=ruler"),
        (["ruler", "."], "has no results of RULER: make them with `python launch/evaluate.py"),
        (["neddle_map"], "did you mean needle_map"),
        (["training_losses", "x"], "give the reference run first"),
        (["training_losses", "docs", "docs"], "docs is not a run folder"),
        (["needle_map"], "python -m eval.papers.needle"),
        (["needle_top", "."], "make them with `python -m eval.papers.needle RUN --texts FILE.jsonl --scores`"),
        (["loss_by_position", "."], "make them with `python -m eval.papers.long_context"),
        (["mqrar", "/nowhere"], "make them with `python -m eval.papers.mqrar curve --out /nowhere`"),
        (["mqrar_attention", "/nowhere"], "python -m eval.papers.mqrar picture"),
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
