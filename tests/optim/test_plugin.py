"""A second optimizer, which needs whole matrices, is one file: it trains, resumes, is estimated, guarded and checked."""

from pathlib import Path
from shutil import copytree

import pytest
import torch
from safetensors import safe_open

from tests.mixers.runs import SHAPE, TRAIN, Command, pretrain, records

WHOLE = ["optimizer.name=orthogonal", "parallel.zero_stage=0", "optimizer.clip=0"]


@pytest.fixture(scope="session")
def command() -> Command:
    return Command(Path(__file__).with_name("orthogonal.py"))


@pytest.fixture(scope="session")
def runs(command: Command, corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """straight: four steps; stopped: two and two."""
    folder = tmp_path_factory.mktemp("orthogonal")
    for run, steps, saves in (("straight", 4, 1), ("stopped", 2, 2), ("stopped", 4, 2)):
        keys = [f"train.max_steps={steps}", f"train.save_every={saves}", "train.guard_every=2"]
        pretrain(command, corpus, folder / run, *WHOLE, *keys)
    return folder


def test_it_goes_on_to_the_same_bits(runs: Path) -> None:
    found = [[records(runs / run, name) for name in ("loss", "lr")] for run in ("straight", "stopped")]
    assert found[0] == found[1]
    files = [runs / run / "checkpoints/step-00000004/rank-00000.safetensors" for run in ("straight", "stopped")]
    with safe_open(files[0], "pt") as one, safe_open(files[1], "pt") as other:
        names = [name for name in one.keys() if not name.startswith("rng")]  # noqa: SIM118
        assert {name.split("/")[0] for name in names} == {"weight", "momentum"}
        assert all(torch.equal(one.get_tensor(name), other.get_tensor(name)) for name in names)


def test_a_step_is_the_definition(runs: Path) -> None:
    """Step 4, from the weights of step 3 and the momentum that it left."""
    lr = records(runs / "straight", "lr")[3]
    before, after = (runs / f"straight/checkpoints/step-0000000{step}/rank-00000.safetensors" for step in (3, 4))
    with safe_open(before, "pt") as old, safe_open(after, "pt") as new:
        for name, shape, is_matrix in (
            ("blocks.0.attention.out.weight", (64, 64), True),
            ("embedding.weight", (-1, 64), False),
            ("norm.weight", (64,), False),
        ):
            weight, momentum = (new.get_tensor(f"{state}/{name}/0").view(shape) for state in ("weight", "momentum"))
            update = momentum.double()
            if is_matrix:
                left, _, right = torch.linalg.svd(update)
                update = left @ right
            decay = 0.1 if len(shape) == 2 else 0.0
            expected = old.get_tensor(f"weight/{name}/0").view(shape).double() * (1 - lr * decay) - lr * update
            torch.testing.assert_close(weight.double(), expected, rtol=0, atol=1e-6, msg=name)


def test_what_divides_matrices_is_refused(command: Command, corpus: Path, tmp_path: Path) -> None:
    arguments = ["config=tiny_softmax", f"data.path={corpus}", f"run_dir={tmp_path}/run", "optimizer.name=orthogonal"]
    said = command("launch/pretrain.py", *arguments, code=2)
    assert "error: optimizer.name=orthogonal needs whole matrices, which parallel.zero_stage=1" in said
    said = command("launch/pretrain.py", *arguments[:-1], "optimizer.name=adam", code=2)
    assert "error: optimizer.name must be one of adamw, muon, orthogonal, not 'adam'" in said
    said = command("launch/pretrain.py", *arguments[:-1], "optimizer.orthogonal.mu=0.5", code=2)
    assert "error: optimizer.orthogonal.mu needs optimizer.name=orthogonal, not adamw" in said


def test_a_run_keeps_its_optimizer(command: Command, runs: Path, corpus: Path, tmp_path: Path) -> None:
    run = copytree(runs / "stopped", tmp_path / "run")
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    keys = ["config=tiny_softmax", f"data.path={corpus}", f"run_dir={run}", *SHAPE, *TRAIN, *WHOLE[1:]]
    said = command("launch/pretrain.py", *keys, code=2)
    assert "another configuration: optimizer.name was orthogonal and is now adamw; give run_dir=" in said
    (run / "config.yaml").unlink()  # the checkpoint's copy decides
    assert "is not a run" in command("launch/pretrain.py", *keys, code=2)
    (run / "config.yaml").write_bytes(before[run / "config.yaml"])
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before


def test_the_estimate_counts_its_states(command: Command) -> None:
    """One state where AdamW has two."""
    code = """
from ssscale.config import load_config
from ssscale.train.estimate import memory_per_gpu
for name in ("adamw", "orthogonal"):
    keys = ["config=tiny_sb", "parallel.zero_stage=0", f"optimizer.name={name}"]
    print(memory_per_gpu(load_config(keys), 1).optimizer)
"""
    adamw, orthogonal = map(float, command("-c", code).split())
    assert adamw == 2 * orthogonal > 0
