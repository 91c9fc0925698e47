"""The fit of p_n: against numpy's least squares, counts by hand, and a run of a few steps."""

import sys
from dataclasses import replace

import numpy as np
import pytest
import torch

from eval.papers.pn_fit import fit_logarithm, main, occurrences
from ssscale.config import to_yaml
from ssscale.config.schema import mixer_config
from ssscale.errors import UserError
from ssscale.hf.convert import WeightsOnly
from ssscale.model.decoder import Decoder
from ssscale.model.mixers.ssmax import Variant
from ssscale.train.checkpoint import TrainState
from ssscale.train.save import save_checkpoint
from tests.eval.conftest import LENGTH


def test_occurrences_count_the_targets_behind_n_keys():
    lengths = np.array([3, 1, 7, 3])
    for size in (2, 5, 9):
        expected = [sum(length > n for length in lengths) for n in range(2, size + 1)]
        assert occurrences(lengths, size).tolist() == [0, *expected]


def test_beyond_a_window_no_more_keys_are_seen():
    lengths = np.array([3, 1, 7, 3])
    seen = [min(n, 4) for length in lengths for n in range(2, length)]
    assert occurrences(lengths, 9, 4).tolist() == [0, *(seen.count(n) for n in range(2, 10))]
    assert occurrences(lengths, 9, 9).tolist() == occurrences(lengths, 9, None).tolist()


@pytest.mark.parametrize("noise", [0.0, 0.3])
def test_fit_is_weighted_least_squares(noise):
    generator = np.random.default_rng(0)
    n = np.arange(1, 201)
    p = 0.7 * np.log(n) - 0.2 + noise * generator.standard_normal(200)
    weights = generator.integers(0, 5, 200).astype(float)
    fit = fit_logarithm(p, weights)
    root = np.sqrt(weights)
    design = np.stack([np.log(n), np.ones(200)], 1) * root[:, None]
    (a1, a2), rest, *_ = np.linalg.lstsq(design, p * root, rcond=None)
    assert fit.a1 == pytest.approx(a1)
    assert fit.a2 == pytest.approx(a2)
    mean = np.average(p, weights=weights)
    assert fit.r2 == pytest.approx(1 - rest.sum() / (weights @ (p - mean) ** 2))


def test_no_weights():
    with pytest.raises(ValueError, match="not all 0"):
        fit_logarithm(np.ones(3), np.zeros(3))


def test_a_run_gives_its_fit_and_figure(run, config, groups, monkeypatch, capsys):
    model = replace(config.model, mixers=["ssmax"], mixer=mixer_config("ssmax", variant=Variant.pn))
    decoder = Decoder(model, groups, LENGTH)
    with torch.no_grad():
        decoder.shared["ssmax"].pn.copy_(0.5 * torch.arange(1, LENGTH + 1).log() + 0.25)
    text = to_yaml(replace(config, model=model))
    save_checkpoint(run / "checkpoints", WeightsOnly(decoder), groups, TrainState(step=20), {"config.yaml": text})
    (run / "config.yaml").write_text(text)
    monkeypatch.setattr(sys, "argv", ["pn_fit", str(run)])
    main()
    assert "p_n ≈ 0.5000 ln n +0.2500, R² 1.0000 over 126 n, 10,240 tokens" in capsys.readouterr().out
    assert (run / "pn.png").stat().st_size > 10_000


def test_a_run_without_pn_says_so(run, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["pn_fit", str(run)])
    with pytest.raises(UserError, match="has no p_n: the run needs"):
        main()


def test_a_figure_of_another_kind_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["pn_fit", str(tmp_path), "--figure", "pn.svg"])
    with pytest.raises(
        UserError, match=r"--figure pn\.svg: the figure is a PNG image, so its name has to end in \.png"
    ):
        main()
