"""What reads a checkpoint reads a whole one: evaluation, export and report compare its files with their checksums."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from launch.evaluate import main as evaluate
from launch.export import main as export
from launch.report import main as report
from ssscale.errors import UserError
from ssscale.parallel.groups import Groups
from tests.train.checkpoints import sign
from tests.train.commands import run_command
from tests.train.ranks import Ranks

NEWEST, BEFORE = "step-00000004", "step-00000002"


@pytest.fixture(scope="module")
def run(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of steps 2 and 4."""
    folder = tmp_path_factory.mktemp("verified") / "run"
    keys = [f"data.path={corpus}", "data.num_workers=0", "train.save_every=2", "train.max_steps=4"]
    Ranks(keys, folder, size=1).finish()
    return folder


@pytest.fixture
def copy(run: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(run, tmp_path / "run"))


def edit_json(file: Path, edit: Callable[[dict], object]) -> None:
    content = json.loads(file.read_text())
    edit(content)
    file.write_text(json.dumps(content))


def flip(checkpoint: Path) -> None:
    file = checkpoint / "rank-00000.safetensors"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def forget(name: str) -> Callable[[Path], None]:
    def damage(checkpoint: Path) -> None:
        flip(checkpoint)
        edit_json(checkpoint / "checksums.json", lambda entries: entries.pop(name))

    return damage


def fill(value: float) -> Callable[[Path], None]:
    def damage(checkpoint: Path) -> None:
        file = checkpoint / "rank-00000.safetensors"
        weights = load_file(file)
        name = next(name for name in weights if name.startswith("weight/"))
        weights[name][3] = value
        save_file(weights, file)
        sign(checkpoint)

    return damage


def signed(name: str, edit: Callable[[dict], object]) -> Callable[[Path], None]:
    def damage(checkpoint: Path) -> None:
        edit_json(checkpoint / name, edit)
        sign(checkpoint)

    return damage


def huge(index: dict) -> None:
    for entry in index["weights"].values():
        entry["shape"] = [10**9] * len(entry["shape"])


def huge_pieces(index: dict) -> None:
    index["pieces"][0]["numel"] = 10**15


# Damage that shows against the checksums: in a run the checkpoint before it is taken.
SHOWS: dict[str, Callable[[Path], None]] = {
    "an empty list": lambda path: (path / "checksums.json").write_text("{}") and None,
    "weights that no checksum names": forget("rank-00000.safetensors"),
    "a state that no checksum names": forget("state.json"),
    "a configuration that no checksum names": forget("config.yaml"),
    "a list": lambda path: (path / "checksums.json").write_text("[]") and None,
    "a name elsewhere": lambda path: edit_json(path / "checksums.json", lambda e: e.update({"..": e["state.json"]})),
    "a flipped byte": flip,
}
# What a stranger has signed again: nothing shows it but the content.
SIGNED: dict[str, tuple[Callable[[Path], None], str]] = {
    "NaN": (fill(torch.nan), "has NaN or Inf"),
    "Inf": (fill(torch.inf), "has NaN or Inf"),
    "no ranks": (signed("state.json", lambda state: state.update(ranks=0)), "ranks"),
    "ranks as text": (signed("state.json", lambda state: state.update(ranks="one")), "ranks"),
    "no pieces": (signed("rank-00000.json", lambda index: index.update(pieces=[])), "cannot be read"),
    "pieces as a number": (signed("rank-00000.json", lambda index: index.update(pieces=3)), "expected form"),
    "a huge piece": (signed("rank-00000.json", huge_pieces), "expected form"),
    "huge shapes": (signed("rank-00000.json", huge), r"elements are saved|of another model"),
    "a state of lists": (signed("state.json", lambda state: state.update(step=[])), "expected form"),
    "skipped as a number": (signed("state.json", lambda state: state.update(skipped=[3])), "expected form"),
}


def commands(given: Path, out: Path) -> list[tuple[Callable[[list[str]], None], list[str]]]:
    return [
        (export, [f"checkpoint={given}", f"out={out}"]),
        (evaluate, [f"checkpoint={given}", "tasks=none", "baseline=false"]),
    ]


@pytest.mark.parametrize("damage", SHOWS)
def test_a_checkpoint_is_compared_with_its_checksums(
    damage: str, copy: Path, tmp_path: Path, groups: Groups, caplog: pytest.LogCaptureFixture
) -> None:
    SHOWS[damage](copy / "checkpoints" / NEWEST)
    for command, arguments in commands(copy / "checkpoints" / NEWEST, tmp_path / "one"):
        with pytest.raises(UserError, match=NEWEST):
            command(arguments)
    assert not (tmp_path / "one").exists()
    for command, arguments in commands(copy, tmp_path / "out")[:1]:
        caplog.clear()
        command(arguments)
        said = [record.getMessage() for record in caplog.records]
        assert any(NEWEST in text and "the checkpoint before it is taken" in text for text in said), said
    assert (tmp_path / "out/config.json").is_file()


@pytest.mark.parametrize("damage", SIGNED)
def test_what_a_stranger_signed_is_one_sentence(damage: str, copy: Path, tmp_path: Path, groups: Groups) -> None:
    harm, sentence = SIGNED[damage]
    harm(copy / "checkpoints" / NEWEST)
    for command, arguments in commands(copy / "checkpoints" / NEWEST, tmp_path / "out"):
        with pytest.raises(UserError, match=sentence):
            command(arguments)
    assert not (tmp_path / "out").exists()


def test_an_older_step_is_named_in_what_is_printed(copy: Path, tmp_path: Path) -> None:
    flip(copy / "checkpoints" / NEWEST)
    arguments = [f"checkpoint={copy}", "tasks=none", "baseline=false"]
    code, output = run_command("launch.evaluate", arguments, tmp_path / "log")
    assert code == 0, output
    assert f"{NEWEST}/rank-00000.safetensors is broken" in output
    assert "the checkpoint before it is taken" in output
    assert [file.stem for file in (copy / "eval").glob("*.json")] == [BEFORE]


def test_a_report_is_of_a_whole_checkpoint(copy: Path, groups: Groups, capsys: pytest.CaptureFixture[str]) -> None:
    flip(copy / "checkpoints" / NEWEST)
    report([str(copy), "sample=false"])
    assert f"checkpoints/{BEFORE}" in capsys.readouterr().out
