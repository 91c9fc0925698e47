"""Checkpoints that are damaged, that do not fit on the disk, that are kept and that are let go."""

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ssscale.train.checkpoint_folder import list_checkpoints, verify
from ssscale.train.save import Retention
from tests.promises import promises
from tests.train.disks import small_disk as small_disk_at
from tests.train.ranks import Ranks, running, state_of


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


DAMAGES: dict[str, tuple[str, Callable[[Path], object], str]] = {
    "truncated": ("rank-00001.safetensors", lambda file: file.write_bytes(file.read_bytes()[:-9]), "bytes, not"),
    "flipped": ("rank-00000.safetensors", flip, "is broken: its checksum does not match"),
    "empty": ("rank-00001.json", lambda file: file.write_bytes(b""), "has 0 bytes, not"),
    "gone": ("config.yaml", lambda file: file.unlink(), "is missing"),
    "no list": ("checksums.json", lambda file: file.write_bytes(b"{"), "is broken"),
    "empty list": ("checksums.json", lambda file: file.write_bytes(b"{}"), "does not name state.json"),
    "list gone": ("checksums.json", lambda file: file.unlink(), "is missing"),
}


@pytest.fixture(scope="module")
def run(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 6 steps with checkpoints at 2, 4 and 6."""
    folder = tmp_path_factory.mktemp("saves") / "run"
    arguments = [f"data.path={corpus}", "train.save_every=2", "train.keep=3", "train.max_steps=6"]
    Ranks(arguments, folder).finish()
    return folder


def test_saves_are_written_while_training_goes_on(run: Path) -> None:
    found = list_checkpoints(run / "checkpoints")
    assert [state_of(path)["step"] for path in found] == [2, 4, 6]
    assert [verify(path) for path in found] == [None] * 3
    assert not list((run / "checkpoints").glob("*.partial"))


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_found_and_named(damage: str, run: Path, tmp_path: Path) -> None:
    name, break_it, sentence = DAMAGES[damage]
    copy = tmp_path / "step-00000006"
    shutil.copytree(run / "checkpoints/step-00000006", copy)
    break_it(copy / name)
    problem = verify(copy)
    assert problem is not None
    assert f"{copy / name}" in problem
    assert sentence in problem


def test_a_broken_checkpoint_is_passed_over(run: Path, corpus: Path, tmp_path: Path) -> None:
    copy = tmp_path / "run"
    shutil.copytree(run, copy)
    for step, damage in ((6, "truncated"), (4, "flipped")):
        name, break_it, _ = DAMAGES[damage]
        break_it(copy / f"checkpoints/step-{step:08d}" / name)
    arguments = [f"data.path={corpus}", "train.save_every=2", "train.keep=3", "train.max_steps=6"]
    again = Ranks(arguments, copy)
    again.finish()
    output = again.output()
    assert "step-00000006/rank-00001.safetensors has" in output
    assert (
        "step-00000004/rank-00000.safetensors is broken: its checksum does not match; the checkpoint before" in output
    )
    assert "step-00000002 (step 2)" in output
    for name in ("rank-00000.safetensors", "rank-00001.safetensors"):
        whole, mended = ((folder / "checkpoints/step-00000006" / name).read_bytes() for folder in (run, copy))
        assert whole == mended


@promises(
    "Files and disks",
    "every checkpoint is damaged",
    seen="`… has no whole checkpoint left`; the message says what is wrong with the newest one",
    code="2",
    identical="nothing is changed",
    do="restore a checkpoint; or begin again: give another `run_dir`, or move the run folder away",
)
def test_nothing_whole_is_left(run: Path, corpus: Path, tmp_path: Path) -> None:
    copy = tmp_path / "run"
    shutil.copytree(run, copy)
    for path in list_checkpoints(copy / "checkpoints"):
        flip(path / "rank-00000.safetensors")
    ranks = Ranks([f"data.path={corpus}", "train.max_steps=8"], copy)
    assert ranks.wait() == [2, 2]
    assert "has no whole checkpoint left" in ranks.output()


def test_retention(tmp_path: Path) -> None:
    losses = {10: 3.0, 20: 1.0, 30: 2.0, 40: None, 50: 1.5}
    for step, loss in losses.items():
        path = tmp_path / f"step-{step:08d}"
        path.mkdir()
        (path / "checksums.json").touch()
        (path / "state.json").write_text(f'{{"step": {step}, "valid_loss": {"null" if loss is None else loss}}}')
    found = list_checkpoints(tmp_path)

    def stays(retention: Retention) -> list[int]:
        return [int(path.name[5:]) for path in found if path not in retention.doomed(found)]

    assert stays(Retention(last=2)) == [40, 50]
    assert stays(Retention(last=1, every=30)) == [30, 50]
    assert stays(Retention(last=1, best=True)) == [20, 50]
    assert stays(Retention(last=9)) == [10, 20, 30, 40, 50]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB."""
    with small_disk_at(tmp_path / "small", "1m") as folder:
        yield folder


@promises(
    "Files and disks",
    "the disk is full during a save",
    seen="`No space left on device`; the old checkpoint stays whole, and training continues",
    code="0; 2 if the last save of the run fails",
    identical="yes",
    do="make room on the disk; after code 2 run the same command again",
)
def test_a_full_disk_keeps_the_old_checkpoint_and_training_goes_on(
    small_disk: Path, corpus: Path, tmp_path: Path
) -> None:
    # 43,104 parameters, 12 bytes each: one checkpoint fits, two do not.
    run_dir = small_disk / "run"
    arguments = [f"data.path={corpus}", "train.save_every=4", "train.max_steps=8", "train.keep=2"]
    ranks = Ranks(arguments, run_dir)
    assert ranks.wait() == [2, 2]
    output = ranks.output()
    assert "No space left on device" in output
    assert "step 8 is not saved; earlier checkpoints are kept" in output
    assert "the last step could not be saved" in output
    (left,) = list_checkpoints(run_dir / "checkpoints")
    assert state_of(left)["step"] == 4
    assert verify(left) is None


@promises(
    "Files and disks",
    "the disk is full at the start of a stage that changes the model",
    seen="the run ends: `stage … changes the model, and step 8 could not be saved`",
    code="2",
    identical="from the last save",
    do="make room on the disk; run the same command again",
)
def test_a_model_is_never_changed_on_older_weights(small_disk: Path, corpus: Path) -> None:
    """The stage that changes the model begins from a save of the step before it, which does not fit here."""
    constant = {"kind": "constant", "lr": 1e-3}
    stages = [
        {"name": "softmax", "tokens": 8192, "schedule": constant},  # 8 steps
        {"name": "ssmax", "tokens": 8192, "schedule": constant, "model": {"mixers": ["ssmax"]}},
    ]
    arguments = [f"data.path={corpus}", "train.save_every=4", "train.keep=2", f"train.stages={json.dumps(stages)}"]
    arguments += ["model.mixers=[softmax]", "model.position.method=rope", "data.num_workers=0"]
    ranks = Ranks(arguments, small_disk / "run", size=1)
    assert ranks.wait() == [2], ranks.output()
    assert ranks.records()[-1]["step"] == 8
    assert "stage ssmax changes the model, and step 8 could not be saved in" in ranks.output()
    assert "trains again from step 4" in ranks.output()


def test_what_cannot_be_committed_is_not_saved(corpus: Path, tmp_path: Path) -> None:
    arguments = [f"data.path={corpus}", "train.save_every=100", "data.num_workers=0", "train.max_steps=200"]
    with running(arguments, tmp_path / "run", size=1) as ranks:
        ranks.wait_for(lambda: any("saved_step" in record for record in ranks.records()))
        # A mounted folder cannot be renamed.
        with small_disk_at(tmp_path / "run/checkpoints/step-00000200", "64k"):
            assert ranks.wait() == [2], ranks.output()
    assert "step-00000200.partial could not be committed" in ranks.output()
    assert "the last step could not be saved" in ranks.output()
    (tmp_path / "run/checkpoints/step-00000200").rmdir()
    again = Ranks(arguments, tmp_path / "run", size=1)
    again.finish()
    assert "(step 100)" in again.output()
