"""A mixer in one file goes through everything: config, training, parallelism, estimate, resume, generation, export."""

import subprocess
import sys
from pathlib import Path

import pytest

from ssscale.options import last_of_each
from tests.mixers.conftest import PLUGIN, ROOT
from tests.mixers.runs import SHAPE, Command, pretrain, records

MODEL = [
    "model.mixers=[retnet]",
    "model.position.method=rope",
    "model.num_layers=2",
    "train.stages.0.schedule.warmup_tokens=0",
]


@pytest.fixture(scope="module")
def run(command: Command, corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Trained in one process, in two goes, the first of a new interpreter whose rank gets the plugin from the command."""
    folder = tmp_path_factory.mktemp("retnet") / "run"
    for steps in (2, 4):
        pretrain(command, corpus, folder, *MODEL, f"train.max_steps={steps}", "train.observe_every=2", fresh=steps == 2)
    return folder


def test_the_file_is_small_and_its_name_stands_nowhere_else() -> None:
    assert len(PLUGIN.read_text().splitlines()) <= 80
    for folder in ("ssscale", "kernels", "launch", "eval", "configs"):
        assert not [file for file in (ROOT / folder).rglob("*.py") if "retnet" in file.read_text()]


def test_it_trains_and_resumes(run: Path, command: Command, corpus: Path, tmp_path: Path) -> None:
    losses = records(run, "loss")
    assert pretrain(command, corpus, tmp_path / "once", *MODEL, "train.max_steps=4") == losses
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("layout", ["parallel.tensor=2", "parallel.ulysses=2"])
def test_two_processes_train_as_one(layout: str, run: Path, command: Command, corpus: Path, tmp_path: Path) -> None:
    found = pretrain(command, corpus, tmp_path / "run", *MODEL, "train.max_steps=4", layout, ranks=2)
    assert found == pytest.approx(records(run, "loss"), rel=2e-5)


def test_it_is_observed(run: Path) -> None:
    seen = records(run, "retnet_size")
    assert len(seen) == 2
    assert all(len(layers) == 2 and min(layers) > 0 for layers in seen)


def test_it_is_estimated(command: Command) -> None:
    parameters = 2 * (64 * 16 * (4 + 2 + 2) + 64 * 64 + 3 * 64 * 64 + 2 * 64 + 4) + 64 + 1024 * 64
    assert f"{parameters:,}" in command("launch/estimate.py", "config=tiny_softmax", *SHAPE, *MODEL, "gpus=1")


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (["model.mixer.retnet.rat=2"], "did you mean model.mixer.retnet.rate?"),
        (
            ["model.position.method=alibi"],
            "model.position.method=alibi does not go with model.mixers=[retnet]: use nope or rope",
        ),
        (["parallel.ring=2", "processes=2"], "model.mixers: retnet does not define `ring`"),
        (["model.mixers=[softmax]", "model.mixer.retnet.rate=1"], "model.mixer.retnet.rate=1.0 has no effect"),
    ],
)
def test_what_it_does_not_have_is_said(changes: list[str], sentence: str, command: Command) -> None:
    keys = last_of_each(["config=tiny_softmax", *SHAPE, *MODEL, *changes])
    said = command("launch/pretrain.py", *keys, code=2)
    assert sentence in said


@pytest.mark.parametrize("reader", ["evaluate.py", "export.py", "report.py", "pretrain.py"])
def test_without_the_plugin_its_variable_is_named(reader: str, run: Path, corpus: Path, tmp_path: Path) -> None:
    arguments = {
        "evaluate.py": [f"checkpoint={run}", "tasks=none"],
        "export.py": [f"checkpoint={run}", f"out={tmp_path / 'out'}"],
        "report.py": [str(run)],
        "pretrain.py": ["config=tiny_softmax", *SHAPE, *MODEL, f"run_dir={run}", f"data.path={corpus}"],
    }[reader]
    done = subprocess.run([sys.executable, f"launch/{reader}", *arguments], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
    assert "retnet" in done.stderr
    assert done.stderr.endswith(
        "or name the file of the plugin that defines it in the environment variable SSSCALE_PLUGINS\n"
    )


def test_it_generates_and_exports(run: Path, command: Command, tmp_path: Path) -> None:
    command.forked("launch.export", f"checkpoint={run}", f"out={tmp_path / 'hf'}")
    command.forked("tests.mixers.compare_export", str(run), str(tmp_path / "hf"))
