"""Names in a stranger's files never lead out of their folder: training, data_prep and import say so and write nothing."""

import json
import os
import shutil
from pathlib import Path

import pytest

from data_prep.__main__ import main as data_prep
from launch.pretrain import main as pretrain
from ssscale.data.stream import PackedData
from ssscale.errors import UserError
from ssscale.parallel.groups import Groups
from tests.train.lying_names import CASES, NOT_OURS, SECRET, name, tokenizer_elsewhere

TINY = ["config=tiny_sb", "model.num_layers=1", "train.max_steps=1", "train.eval_every=0", "data.num_workers=0"]
ROOT = Path(__file__).resolve().parents[2]
LINKS_ONLY = ("tokenizer is a link", "source folder is a link", "lock is a link", "temporary file is a link")


def snapshot(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.fixture
def hostile(corpus: Path, tmp_path: Path) -> Path:
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside/secret").write_bytes(SECRET)
    target = tmp_path / "data"
    shutil.copytree(corpus, target, ignore=shutil.ignore_patterns("*.mds", "*.lock"))
    return target


@pytest.mark.parametrize("case", CASES)
def test_a_data_folder_cannot_reach_outside(
    case: str, hostile: Path, tmp_path: Path, groups: Groups, capsys: pytest.CaptureFixture[str]
) -> None:
    plant, sentence = CASES[case]
    plant(hostile)
    before = snapshot(tmp_path / "outside")
    with pytest.raises(UserError, match=sentence):
        pretrain([*TINY, f"data.path={hostile}", f"run_dir={tmp_path / 'run'}"])
    assert snapshot(tmp_path / "outside") == before
    copied = [path for path in (tmp_path / "run").rglob("*") if path.is_file() and path.read_bytes() == SECRET]
    assert not copied
    if case not in LINKS_ONLY:  # reading through a link does no harm
        assert data_prep(["verify", str(hostile)]) == 2
        assert capsys.readouterr().err.startswith("error: ")


def test_remote_data_cannot_reach_outside_the_cache(hostile: Path, tmp_path: Path, groups: Groups) -> None:
    tokenizer_elsewhere(hostile)
    (tmp_path / "outside/secret").rename(tmp_path / "secret")  # what the remote side would serve
    keys = [f"data.path={hostile}", f"data.cache={tmp_path / 'cache'}", f"run_dir={tmp_path / 'run'}"]
    with pytest.raises(UserError, match=NOT_OURS):
        pretrain([*TINY, *keys])
    assert not list((tmp_path / "outside").iterdir())


def test_merge_and_foreign_corpora(hostile: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name("zip_data", "../../../outside/shard.00000.mds.zstd")(hostile)
    pack = ["pack", "--out", str(tmp_path / "out"), "--tokenizer", str(hostile / "tokenizer.json"), "--workers", "1"]
    for command in (
        ["merge", str(hostile), "--out", str(tmp_path / "out")],
        ["show", str(hostile)],
        [*pack, "--source", f"a={hostile / 'train/code'}"],
    ):
        assert data_prep(command) == 2
        error = capsys.readouterr().err
        assert NOT_OURS in error or "whole by itself" in error, error
    assert not (tmp_path / "out").exists()


def test_links_inside_are_followed(hostile: Path, groups: Groups) -> None:
    """A data folder that is a link, or has links to its own files, is as good as another."""
    (hostile / "tokenizer.json").rename(hostile / "kept.json")
    (hostile / "tokenizer.json").symlink_to("kept.json")
    link = hostile.with_name("link")
    link.symlink_to(hostile)
    data = PackedData.open(str(link))
    assert Path(data.tokenizer_file).is_file()
    assert len(data.row(0, 0).tokens) == 256


def test_both_programs_judge_names_alike() -> None:
    assert (ROOT / "ssscale/names.py").read_bytes() == (ROOT / "data_prep/names.py").read_bytes()


def test_weights_of_a_hugging_face_folder(tmp_path: Path, groups: Groups) -> None:
    from launch.import_hf import main as import_hf

    folder = tmp_path / "hf"
    folder.mkdir()
    (tmp_path / "secret.json").write_text("{}")
    config = {"model_type": "ssscale", "num_hidden_layers": 1, "hidden_size": 32, "num_attention_heads": 1}
    config |= {"intermediate_size": 32, "vocab_size": 300, "max_position_embeddings": 32}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors.index.json").write_text("{}")
    (folder / "tokenizer.json").symlink_to(tmp_path / "secret.json")
    arguments = [f"from={folder}", f"out={tmp_path / 'run'}"]
    with pytest.raises(UserError, match="a link that leads out"):
        import_hf(arguments)
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(UserError, match="is not a tokenizer"):
        import_hf(arguments)
    from tokenizers import Tokenizer, models

    os.remove(folder / "tokenizer.json")
    Tokenizer(models.BPE()).save(str(folder / "tokenizer.json"))
    for weight_map in ({"lm_head.weight": "../secret.json"}, {"a": "/etc/passwd"}, {"a": 3}, [], {}, None):
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
        with pytest.raises(UserError, match=r"not the name of a file|no `weight_map`"):
            import_hf(arguments)
    assert not (tmp_path / "run").exists()
