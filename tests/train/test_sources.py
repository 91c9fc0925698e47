"""Accounting by source, and data that changes under a checkpoint."""

import json
import shutil
from pathlib import Path

import pytest
import torch

from ssscale.data.batch import Batch, sums_by_position
from ssscale.layout import IGNORE, PackedLayout
from ssscale.train.metrics import losses_by_position
from ssscale.train.records import read_metrics
from tests.pool import Pool
from tests.train.jobs import SMALL


def test_loss_and_tokens_by_source(corpus: Path, tmp_path: Path, pool1: Pool, pool2: Pool) -> None:
    job = {"data": str(corpus), **SMALL}
    (expected,) = pool1.run("tests.train.jobs:first_losses_by_source", run=str(tmp_path / "one"), **job)
    assert pool2.run("tests.train.jobs:train", run=str(tmp_path / "two"), **job) == ["", ""]
    records = read_metrics(tmp_path / "two" / "metrics.jsonl")
    training = [record for record in records if "loss" in record]
    assert len(training) == 4
    assert set(expected) == {"code", "docs"}
    for name, loss in expected.items():
        assert training[0][f"loss/{name}"] == pytest.approx(loss, rel=1e-5)
    for record in training:
        assert record["tokens/code"] + record["tokens/docs"] == record["tokens"]
        low, high = sorted(value for key, value in record.items() if key.startswith("loss/"))
        assert low <= record["loss"] <= high
    validation = [record for record in records if "valid_loss" in record]
    sources = {key for key in validation[-1] if key.startswith("valid_loss/")}
    assert sources == {"valid_loss/code", "valid_loss/docs"}
    positions = sorted(key for key in validation[-1] if key.startswith("valid_position/"))
    assert positions[:4] == [f"valid_position/from_{first:06d}" for first in (0, 1, 2, 4)]


def test_losses_by_position_are_means_over_their_tokens() -> None:
    lengths, length = [5, 1, 2, 8], 16
    layout = PackedLayout.from_lengths(lengths, max_seqlen=length)
    labels = torch.cat([torch.cat([torch.ones(n - 1), torch.tensor([IGNORE])]) for n in lengths]).long()
    losses = torch.rand(length).where(labels != IGNORE, 0.0)
    batch = Batch(torch.zeros(length).long(), labels, layout, torch.zeros(1).long(), 12)
    found = losses_by_position(sums_by_position(losses, batch, length), "at")
    places = [position for n in lengths for position in range(n)]
    for first, last in ((0, 0), (1, 1), (2, 3), (4, 7)):
        inside = [
            loss
            for loss, place, label in zip(losses.tolist(), places, labels)
            if first <= place <= last and label != IGNORE
        ]
        assert found.pop(f"at/from_{first:06d}") == pytest.approx(sum(inside) / len(inside), rel=1e-6)
    assert not found


def test_changed_data_wants_a_flag(corpus: Path, tmp_path: Path, pool1: Pool) -> None:
    data, run = tmp_path / "data", tmp_path / "run"
    shutil.copytree(corpus, data)
    job = {"data": str(data), "run": str(run), **SMALL}
    assert pool1.run("tests.train.jobs:train", **job | {"train.max_steps": 2}) == [""]
    manifest = json.loads((data / "manifest.json").read_text())
    del manifest["files"]["valid/docs/index.json"], manifest["splits"]["valid"]["docs"], manifest["checksum"]
    from data_prep.write_shards import checksum

    (data / "manifest.json").write_text(json.dumps(manifest | {"checksum": checksum(manifest)}))
    (error,) = pool1.run("tests.train.jobs:train", **job)
    assert "is not the data that the checkpoint was trained on" in error
    assert "data.accept_changed=true" in error
    assert pool1.run("tests.train.jobs:train", **job | {"data.accept_changed": True}) == [""]
    assert read_metrics(run / "metrics.jsonl")[-1]["step"] == 4
