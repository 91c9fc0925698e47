"""A softmax checkpoint goes on as SSMax: by init_from, at evaluation, in its loss and to the number."""

import csv
import math
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from eval.checkpoint.scales import write_scales
from ssscale.config.schema import Config, DataConfig, ModelConfig, position_config
from ssscale.errors import UserError
from ssscale.layout import PackedLayout
from ssscale.parallel.groups import Groups
from ssscale.train.build import load_for_inference
from ssscale.train.checkpoint import CheckpointReader
from ssscale.train.checkpoint_folder import list_checkpoints, saved_config
from ssscale.train.stages import begun_model
from tests.pool import Pool
from tests.train.jobs import SMALL

SOFTMAX = {"model.mixers": ["softmax"], "model.position.method": "rope", "train.eval_every": 0}
TRAIN = "tests.train.jobs:train"


@pytest.mark.parametrize(
    ("length", "window", "expected"), [(1024, None, 0.168), (2, None, 2 / math.log(2)), (10, 4, 0)]
)
def test_s_is_one_over_the_mean_of_ln_n(length: int, window: int | None, expected: float) -> None:
    softmax = ModelConfig(position=position_config("rope", window=window))
    model = begun_model(softmax, replace(softmax, mixers=["ssmax"]), length)
    seen = [min(n, window or n) for n in range(1, length + 1)]
    assert model.mixer.ssmax.scale == pytest.approx(length / sum(map(math.log, seen)), rel=1e-12)
    if expected:
        assert model.mixer.ssmax.scale == pytest.approx(expected, abs=5e-4)


@pytest.fixture(scope="module")
def softmax_run(corpus: Path, tmp_path_factory: pytest.TempPathFactory, pool1: Pool) -> Path:
    run = tmp_path_factory.mktemp("softmax") / "run"
    assert pool1.run(TRAIN, data=str(corpus), run=str(run), **(SMALL | SOFTMAX)) == [""]
    return run


@pytest.mark.parametrize("variant", ["learned", "bias", "pn", "fixed"])
def test_init_from_a_softmax_run(variant: str, corpus: Path, softmax_run: Path, tmp_path: Path, pool1: Pool) -> None:
    changes = {"model.mixers": ["ssmax"], "model.mixer.ssmax.variant": variant, "init_from": str(softmax_run)}
    job = SMALL | SOFTMAX | changes | {"data": str(corpus), "run": str(tmp_path), "train.max_steps": 0}
    assert pool1.run(TRAIN, **job) == [""]
    (checkpoint,) = list_checkpoints(tmp_path / "checkpoints")
    old = CheckpointReader(list_checkpoints(softmax_run / "checkpoints")[-1])
    new = CheckpointReader(checkpoint)
    for name in old.weights:
        assert torch.equal(old.whole(name, "weight"), new.whole(name, "weight")), name
    added = {name.rpartition(".")[2] for name in new.weights.keys() - old.weights.keys()}
    assert added == {"learned": {"s"}, "bias": {"s", "b"}, "pn": {"s", "b", "pn"}, "fixed": set()}[variant]
    expected = 1.0 if variant == "pn" else 256 / sum(map(math.log, range(1, 257)))
    files = write_scales(checkpoint, saved_config(checkpoint), tmp_path)
    assert [file.name for file in files] == ["ssmax.csv", *(["pn.csv"] if variant == "pn" else [])]
    header, *rows = csv.reader(files[0].open())
    assert header == ["layer", "head", "s", *(["b"] if "b" in added else [])]
    assert [row[:2] for row in rows] == [["0", "0"], ["0", "1"]]
    assert float(rows[1][2]) == pytest.approx(1.0 if variant in ("pn", "fixed") else expected)
    if variant == "pn":
        assert list(csv.reader(files[1].open()))[-1] == ["256", "1.0"]
    for name in added:
        value = new.whole("shared.ssmax.pn" if name == "pn" else f"blocks.0.attention.weights.{name}", "weight")
        torch.testing.assert_close(value, torch.full_like(value, {"s": expected, "b": 0.0, "pn": 1.0}[name]))
    # The same command trains on from there, and resumes although its source is no longer asked.
    job |= {"train.max_steps": 2, "init_from": str(softmax_run)}
    assert pool1.run(TRAIN, **job) == [""]
    assert CheckpointReader(list_checkpoints(tmp_path / "checkpoints")[-1]).state.step == 2


def test_mistakes_are_one_sentence(corpus: Path, softmax_run: Path, tmp_path: Path, pool1: Pool) -> None:
    job = SMALL | SOFTMAX | {"data": str(corpus), "run": str(tmp_path / "a"), "init_from": str(tmp_path)}
    assert pool1.run(TRAIN, **job) == [f"init_from={tmp_path}: neither a checkpoint nor a run folder that has one"]
    shutil.copytree(softmax_run, tmp_path / "damaged")
    weights = list_checkpoints(tmp_path / "damaged" / "checkpoints")[-1] / "rank-00000.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"?")
    (error,) = pool1.run(TRAIN, **(job | {"run": str(tmp_path / "c"), "init_from": str(tmp_path / "damaged")}))
    assert error.startswith(f"init_from={tmp_path / 'damaged'}: ")
    assert "rank-00000.safetensors" in error
    job |= {"run": str(tmp_path / "b"), "init_from": str(softmax_run), "model.ffn_hidden_size": 64}
    assert "is of another model: blocks.0.mlp" in pool1.run(TRAIN, **job)[0]


def logits(run: Path, groups: Groups, *changes: str) -> tuple[torch.Tensor, Config]:
    model, config = load_for_inference(run, groups, changes=changes)
    tokens = torch.arange(200) % 97
    with torch.no_grad():
        return model(tokens, PackedLayout.from_lengths([200])), config


def test_evaluation_changes_what_is_no_weight(softmax_run: Path, groups: Groups) -> None:
    before, config = logits(softmax_run, groups)
    assert config.data == DataConfig(path=config.data.path, length=256, num_workers=0)
    seen = [before]
    for changes in (
        ["rope.base=500000"],
        ["rope.scaling=linear", "rope.factor=2"],
        ["rope.scaling=dynamic_ntk", "rope.train_length=100"],
        ["window=20"],
    ):
        found, config = logits(softmax_run, groups, *(f"model.position.{change}" for change in changes))
        assert all((found - other).abs().max() > 1e-6 for other in seen)
        seen.append(found)
    assert torch.equal(logits(softmax_run, groups, "model.position.rope.base=10000")[0], before)
    switched, config = logits(softmax_run, groups, "model.mixers=[ssmax]")
    assert config.model.mixers == ["ssmax"]
    assert 1e-6 < (switched - before).abs().max() < (before.max() - before.min())
    with pytest.raises(UserError, match=r"set model\.position\.rope\.train_length"):
        logits(softmax_run, groups, "model.position.rope.scaling=dynamic_ntk")
    with pytest.raises(UserError, match=r"only the model has blocks\.0\.attention\.position_weights"):
        logits(softmax_run, groups, "model.position.method=fire")
