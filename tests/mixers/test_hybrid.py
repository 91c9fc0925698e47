"""A model whose layers mix in different ways: training, parallelism, resume, stages, observation, generation, export."""

from pathlib import Path

import pytest

from ssscale.config import load_config
from ssscale.errors import UserError
from ssscale.train.checkpoint import CheckpointReader
from ssscale.train.checkpoint_folder import list_checkpoints
from ssscale.validate import validate
from tests.mixers.runs import Command, pretrain, records

MODEL = [
    "model.mixers=[stickbreaking, stickbreaking, softmax]",
    "model.num_layers=4",
    "model.position.method=rope",
    "train.stages.0.schedule.warmup_tokens=0",  # so that four steps learn something from any text
]


@pytest.fixture(scope="module")
def run(command: Command, corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Trained in one process, in two goes."""
    folder = tmp_path_factory.mktemp("hybrid") / "run"
    for steps in (2, 4):
        pretrain(command, corpus, folder, *MODEL, f"train.max_steps={steps}", "train.observe_every=2")
    return folder


def test_the_pattern_is_repeated_over_the_layers() -> None:
    model = load_config(["config=tiny_softmax", *MODEL]).model
    assert [mixer.name for mixer in model.layer_mixers] == [
        "stickbreaking",
        "stickbreaking",
        "softmax",
        "stickbreaking",
    ]
    assert [model.place_of(mixer).name for mixer in model.layer_mixers] == ["nope", "nope", "rope", "nope"]


def test_it_resumes(run: Path, command: Command, corpus: Path, tmp_path: Path) -> None:
    losses = records(run, "loss")
    assert pretrain(command, corpus, tmp_path / "once", *MODEL, "train.max_steps=4") == losses
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("layout", ["parallel.tensor=2", "parallel.ulysses=2", "parallel.ring=2"])
def test_two_processes_train_as_one(layout: str, run: Path, command: Command, corpus: Path, tmp_path: Path) -> None:
    found = pretrain(command, corpus, tmp_path / "run", *MODEL, "train.max_steps=4", layout, ranks=2)
    assert found == pytest.approx(records(run, "loss"), rel=1e-4)


def test_only_layers_that_break_sticks_are_observed(run: Path) -> None:
    seen = records(run, "stick_unspent")
    assert len(seen) == 2
    assert all([layer is None for layer in layers] == [False, False, True, False] for layers in seen)


def test_a_stage_changes_the_layers_that_can_be_changed(
    run: Path, command: Command, corpus: Path, tmp_path: Path
) -> None:
    """From softmax to SSMax in the third layer: the others go on as they are."""
    changed = "model.mixers=[stickbreaking, stickbreaking, ssmax]"
    pretrain(command, corpus, tmp_path / "run", *MODEL, changed, f"init_from={run}", "train.max_steps=1")
    before, after = (
        CheckpointReader(list_checkpoints(folder / "checkpoints")[-1]) for folder in (run, tmp_path / "run")
    )
    assert after.weights.keys() - before.weights.keys() == {"blocks.2.attention.weights.s"}


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (["model.mixers=[]"], "model.mixers is empty"),
        (
            ["model.mixers=[softmax, nosuch]"],
            "there is no mixer nosuch; use softmax, ssmax or stickbreaking",
        ),
        (["model.mixers=[ssmax, stickbreaking]", "model.position.method=alibi"], "use nope or rope; SSMax scales q"),
        (["model.num_layers=2"], "model.mixers is a pattern of 3 layers, and the model has model.num_layers=2"),
        (["train.stages.1.model.mixers=[ssmax]"], "ssmax can only begin from softmax, not from stickbreaking"),
        (["train.stages.1.model.num_layers=3"], "train.stages.1.model.num_layers: a stage can change mixers"),
    ],
)
def test_patterns_that_cannot_be(changes: list[str], sentence: str) -> None:
    with pytest.raises(UserError) as caught:
        validate(load_config(["config=tiny_softmax", *MODEL, *changes]))
    assert sentence in str(caught.value)


def test_it_generates_and_exports(run: Path, command: Command, tmp_path: Path) -> None:
    command.forked("launch.export", f"checkpoint={run}", f"out={tmp_path / 'hf'}")
    command.forked("tests.mixers.compare_export", str(run), str(tmp_path / "hf"))
