"""Learning rates that are too high for the width are named before the run starts."""

from pathlib import Path

import pytest

from ssscale.config import load_config, run_names
from ssscale.train.advice import learning_rate_advice
from tests.train.ranks import Ranks


@pytest.mark.parametrize("name", run_names())
def test_no_shipped_run_file_is_warned_about(name: str) -> None:
    assert learning_rate_advice(load_config([f"config={name}"])) is None


def test_the_run_file_that_trained_badly_is_warned_about() -> None:
    """1b at 0.01 without the width transfer: loss 6.30 where 3.5 was possible."""
    keys = ["base_hidden_size=null", "embedding_multiplier=1", "residual_multiplier=1", "attention_scale=null"]
    config = load_config(["config=1b_sb", "model.init_std=0.02", *(f"model.width.{key}" for key in keys)])
    assert learning_rate_advice(config) == (
        "the matrices' learning rate reaches 0.01, above 2 / hidden_size = 0.0013, the most that is known to train well "
        "without width transfer (docs/results/width.md); lower train.stages.N.schedule.lr to at most 0.0013, or include "
        "model/power_width, which divides it by the width"
    )


@pytest.mark.parametrize(("lr", "warned"), [(0.03125, False), (0.0313, True)])
def test_the_threshold_scales_with_the_width(lr: float, warned: bool) -> None:
    """2^-5, the highest rate that was best at a width, passes at every width."""
    for width in (1536, 3072):
        config = load_config(["config=1b_sb", f"model.hidden_size={width}", f"train.stages.0.schedule.lr={lr}"])
        assert (learning_rate_advice(config) is not None) is warned


def test_a_later_stage_counts() -> None:
    keys = ["train.stages.1.schedule.kind=constant", "train.stages.1.schedule.lr=0.1"]
    advice = learning_rate_advice(load_config(["config=1b_sb", *keys]))
    assert advice is not None
    assert advice.startswith("the matrices' learning rate reaches 0.017")


def test_pretrain_says_it_once(tmp_path: Path, corpus: Path) -> None:
    arguments = [f"data.path={corpus}", "data.num_workers=0", "train.stages.0.schedule.lr=1", "train.max_steps=1"]
    ranks = Ranks([*arguments, "train.save_every=0"], tmp_path / "run", size=2)
    ranks.finish()
    assert ranks.output().count("the matrices' learning rate reaches 1,") == 1
