"""The width study in miniature: one command trains, resumes, and gives the table and the figure."""

import json
from pathlib import Path

import pytest

from eval.papers.width_study import draw, main, table, transfer_keys, variants_of
from ssscale.config import load_config
from ssscale.errors import UserError
from tests.eval.conftest import LENGTH, VOCAB


def test_a_study_trains_what_is_missing(data_folder: str, tmp_path: Path, monkeypatch, capsys) -> None:
    arguments = [data_folder, "--widths", "64", "--lrs", "7", "--rows", "2", "--length", str(LENGTH)]
    arguments += ["--tokens", str(12 * 2 * LENGTH), "--microbatch", "2", "--out", str(tmp_path)]
    arguments += ["--variant", "plain", f"model.vocab_size={VOCAB}", "model.num_layers=1", "train.eval_rows=2"]
    monkeypatch.setattr("sys.argv", ["width_study", *arguments])
    main()
    (run,) = json.loads((tmp_path / "results.json").read_text())["runs"]
    assert 2 < run["loss"] < 30
    assert run["valid_loss"] is not None
    assert (run["variant"], run["width"], run["lr_log2"]) == ("plain", 64, -7)
    assert "# plain_64_2^-7: loss" in capsys.readouterr().out
    saved = (tmp_path / "results.json").read_text()
    main()
    assert "# plain" not in capsys.readouterr().out  # nothing was trained again
    assert (tmp_path / "results.json").read_text() == saved
    assert {file.suffix for file in tmp_path.glob("width.*")} == {".png", ".pdf"}


def test_the_transfer_is_what_1b_ships_with() -> None:
    config = load_config(["config=50m_softmax", *transfer_keys()])
    shipped = load_config(["config=1b_softmax"])
    assert (config.model.width, config.model.init_std) == (shipped.model.width, shipped.model.init_std)
    assert config.model.depth_scaled_init == shipped.model.depth_scaled_init


def test_variants() -> None:
    assert list(variants_of([])) == ["transfer", "none"]
    assert variants_of(["s=1", "b model.init_std=1"])["b"] == (*transfer_keys(), "model.init_std=1")
    with pytest.raises(UserError, match="'depth' is not of the form key=value"):
        variants_of(["no depth"])


def test_table_and_figure_of_runs_that_diverged() -> None:
    losses = {(64, -7): 3.0, (64, -6): None, (128, -7): 2.5, (128, -6): 2.25}
    runs = [{"variant": "a", "width": w, "lr_log2": lr, "loss": loss} for (w, lr), loss in losses.items()]
    assert table(runs).splitlines()[2:] == [
        "| a | 64 | **3.000** | NaN | 2^-7 |",
        "| a | 128 | 2.500 | **2.250** | 2^-6 |",
    ]
    assert len(draw(runs).axes) == 1


def test_runs_share_the_visible_gpus_only(data_folder: str, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    names = []

    def execute(run, options, gpus):
        names.append(gpu := gpus.get())
        gpus.put(gpu)
        return {"variant": run.variant, "width": run.width, "lr_log2": run.lr_log2, "loss": 3.0}

    monkeypatch.setattr("eval.papers.width_study.execute", execute)
    arguments = [data_folder, "--widths", "64", "--lrs", "7,6", "--jobs", "2", "--out", str(tmp_path)]
    monkeypatch.setattr("sys.argv", ["width_study", *arguments])
    main()
    assert names == ["3"] * 4
