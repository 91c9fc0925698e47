"""A run with `train.microbatch=auto`, gone on with by another number of ranks."""

from pathlib import Path

import pytest

from ssscale.config import from_yaml
from ssscale.config.choices import Auto
from tests.train.ranks import Ranks

ARGUMENTS = ["train.microbatch=auto", "train.save_every=4", "data.num_workers=0", "train.batch_size=8"]
WARMUP = "train.stages.0.batch_warmup=[{batch_size: 2, tokens: 1024}]"  # 2 steps of 2 rows × 256 tokens


def test_auto_is_chosen_again_at_every_start(corpus: Path, tmp_path: Path) -> None:
    arguments = [*ARGUMENTS, WARMUP, "train.stages.0.tokens=1312768", f"data.path={corpus}"]
    fixed = Ranks([*arguments, "train.microbatch=1", "train.max_steps=8"], tmp_path / "fixed")
    fixed.finish()
    run = Ranks([*arguments, "train.max_steps=4"], tmp_path / "run")
    run.finish()
    chosen = "train.microbatch=auto: 1 of the 1 rows per rank and step"
    assert run.output().count(f"{chosen}; estimated memory 0.0 of 79.0 GiB, those of an H100, as there is no GPU") == 1
    assert run.output().count("train.microbatch=auto: 4 of the 4 rows per rank and step") == 1
    first = (tmp_path / "run/checkpoints/step-00000004/config.yaml").read_text()
    assert from_yaml(first).train.microbatch_rows == 4
    assert from_yaml((tmp_path / "run/config.yaml").read_text()).train.microbatch is Auto.auto
    alone = Ranks([*arguments, "train.max_steps=8"], tmp_path / "run", size=1)
    alone.finish()
    assert alone.output().count("train.microbatch=auto: 8 of the 8 rows per rank and step") == 1
    ours, theirs = ([r["loss"] for r in ranks.records() if "loss" in r] for ranks in (alone, fixed))
    assert ours == pytest.approx(theirs, rel=1e-5)
    assert len(ours) == 8
