"""The width study in miniature: one command trains, resumes, and gives the table and the figure."""

import json
import subprocess
import sys
import threading
import time
from argparse import Namespace
from pathlib import Path

import psutil
import pytest

from eval.papers.width_study import ROOT, Run, arguments_of, draw, main, table, transfer_keys, variants_of
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


def test_a_training_ends_with_a_study_that_is_killed(data_folder: str, tmp_path: Path) -> None:
    """It trained on, unseen, and kept its GPU."""
    arguments = [
        data_folder,
        "--widths",
        "64",
        "--lrs",
        "7",
        "--rows",
        "2",
        "--length",
        str(LENGTH),
        "--microbatch",
        "2",
    ]
    arguments += ["--out", str(tmp_path), "--variant", "plain", f"model.vocab_size={VOCAB}", "model.num_layers=1"]
    study = subprocess.Popen([sys.executable, "-m", "eval.papers.width_study", *arguments], cwd=ROOT)
    try:
        end = time.monotonic() + 120
        while not list(tmp_path.glob("*/metrics.jsonl")):
            assert study.poll() is None
            assert time.monotonic() < end
            time.sleep(0.1)
        (training,) = psutil.Process(study.pid).children()
    finally:
        study.kill()
    training.wait(60)


def test_what_is_missing_is_named(monkeypatch, capsys) -> None:
    """It named key=value as well, which may be left out."""
    monkeypatch.setattr("sys.argv", ["width_study"])
    with pytest.raises(SystemExit):
        main()
    assert capsys.readouterr().err == "error: the following arguments are required: DATA; --help lists all arguments\n"


def test_the_transfer_is_what_1b_ships_with() -> None:
    config = load_config(["config=50m_softmax", *transfer_keys()])
    shipped = load_config(["config=1b_softmax"])
    assert (config.model.width, config.model.init_std) == (shipped.model.width, shipped.model.init_std)
    assert config.model.depth_scaled_init == shipped.model.depth_scaled_init


def test_keys_of_a_variant_replace_those_of_the_study() -> None:
    names = {"rows": 2, "length": 64, "tokens": 1280, "config": "50m_softmax", "data": "data", "microbatch": 2}
    options = Namespace(**names, keys=["train.log_every=5"])
    ((name, keys),) = variants_of(["wide model.init_std=0.5"]).items()
    pairs = [word.split("=", 1) for word in arguments_of(Run(name, 128, -7, keys), options)]
    assert len(dict(pairs)) == len(pairs), "launch/pretrain.py refuses a key that is given twice"
    assert (dict(pairs)["model.init_std"], dict(pairs)["train.log_every"]) == ("0.5", "5")


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
    arguments += ["--length", str(LENGTH), f"model.vocab_size={VOCAB}"]
    monkeypatch.setattr("sys.argv", ["width_study", *arguments])
    main()
    assert names == ["3"] * 4


def order(data: str, out: Path, monkeypatch, *arguments: str) -> None:
    """Call the command on one CPU with arguments of small runs, which `arguments` change."""
    small = ["--widths", "64", "--lrs", "7", "--rows", "2", "--length", str(LENGTH), "--microbatch", "2"]
    small += ["--variant", "plain", "--out", str(out), f"model.vocab_size={VOCAB}"]
    monkeypatch.setattr("sys.argv", ["width_study", data, *small, *arguments])
    main()


def fake(run, options, gpus) -> dict:
    """In place of a training."""
    if run.lr_log2 == -6:
        raise UserError("the run failed")
    return {"variant": run.variant, "width": run.width, "lr_log2": run.lr_log2, "loss": 3.0, "keys": list(run.keys)}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--tokens", "0"], "--tokens must be at least 1, not 0"),
        (["--rows", "-1"], "--rows must be at least 1, not -1"),
        (["--jobs", "0"], "--jobs must be at least 1, not 0"),
        (["--length", "7"], "tokens, but data.length=7"),
        (["--config", "50m_softmx"], "there is no configs/50m_softmx.yaml; did you mean 50m_softmax"),
        (["--variant", "last model.mixer.ssmax.scal=1"], "there is no key 'model.mixer.ssmax.scal'; did you mean"),
        (["--microbatch", "3"], "train.batch_size=2 is not a multiple of the 3 rows"),
        (["train.foo=1"], "there is no key 'train.foo'"),
        (["train.seed=1", "train.seed=2"], "train.seed is given twice, as train.seed=1 and as train.seed=2"),
        (
            ["--variant", "v model.init_std=1 model.init_std=2"],
            "model.init_std is given twice, as model.init_std=1 and",
        ),
    ],
)
def test_mistakes_are_found_before_the_first_run(
    arguments: list[str], said: str, data_folder: str, tmp_path: Path, monkeypatch, capsys
) -> None:
    """Wrong keys were found when their run began, hours later, and zeros ended in a traceback."""
    monkeypatch.setattr("eval.papers.width_study.execute", lambda *_: pytest.fail("a run has begun"))
    with pytest.raises(SystemExit) as error:
        order(data_folder, tmp_path / "out", monkeypatch, *arguments)
    assert error.value.code == 2
    (sentence,) = capsys.readouterr().err.splitlines()
    assert sentence.startswith("error: ")
    assert said in sentence
    assert not (tmp_path / "out").exists()


def test_results_of_another_study_stay(data_folder: str, tmp_path: Path, monkeypatch, capsys) -> None:
    """They were overwritten, and those of a variant with other keys were taken for its results."""
    monkeypatch.setattr("eval.papers.width_study.execute", fake)
    order(data_folder, tmp_path, monkeypatch)
    before = (tmp_path / "results.json").read_text()
    for arguments, said in (
        (["--tokens", "9999"], "is of a study with other tokens: choose another --out"),
        (["--rows", "4", "model.num_layers=1"], "is of a study with other rows and keys: choose another --out"),
        (["--variant", "plain model.init_std=1"], "has the variant plain with other keys: choose another name or"),
    ):
        with pytest.raises(SystemExit):
            order(data_folder, tmp_path, monkeypatch, *arguments)
        assert said in capsys.readouterr().err
        assert (tmp_path / "results.json").read_text() == before


def test_what_ends_beside_a_failed_run_is_kept(data_folder: str, tmp_path: Path, monkeypatch, capsys) -> None:
    """Results were written in the order of the runs, so a failure lost what had ended after it."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    began = threading.Barrier(2)

    def execute(run, options, gpus):
        began.wait()
        return fake(run, options, gpus)

    monkeypatch.setattr("eval.papers.width_study.execute", execute)
    with pytest.raises(SystemExit):
        order(data_folder, tmp_path, monkeypatch, "--lrs", "6,7", "--jobs", "2")
    assert "error: the run failed" in capsys.readouterr().err
    assert [run["lr_log2"] for run in json.loads((tmp_path / "results.json").read_text())["runs"]] == [-7]


def test_a_study_whose_runs_all_diverged_is_drawn() -> None:
    runs = [{"variant": "a", "width": 64, "lr_log2": rate, "loss": None} for rate in (-7, -6)]
    assert len(draw(runs).axes) == 1
