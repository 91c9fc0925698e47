"""Which configurations may continue a run, and how a difference is said."""

import re
from pathlib import Path

import pytest
import yaml

from ssscale.config import load_config
from ssscale.config.choices import Precision
from ssscale.config.kinds import spelled
from ssscale.errors import UserError
from ssscale.train.checkpoint import TrainState
from ssscale.train.run_folder import check_folder, read_rollback, record_config, write_rollback


@pytest.mark.parametrize(
    ("before", "after", "difference"),
    [
        ("optimizer.name=adamw", "optimizer.name=muon", "optimizer.name was adamw and is now muon"),
        ("optimizer.name=muon", "optimizer.name=adamw", "optimizer.name was muon and is now adamw"),
        ("data.one_document=false", "data.one_document=true", "data.one_document was false and is now true"),
        ("model.position.window=null", "model.position.window=64", "model.position.window was null and is now 64"),
        ("model.mixers=[softmax]", "model.mixers=[ssmax]", "model.mixers was [softmax] and is now [ssmax]"),
    ],
)
def test_another_value_is_refused_in_the_spelling_of_run_files(
    before: str, after: str, difference: str, tmp_path: Path
) -> None:
    record_config(tmp_path, load_config(["config=tiny_softmax", before]))
    check_folder(tmp_path, load_config(["config=tiny_softmax", before]))
    sentence = f"{tmp_path} holds a run with another configuration: {difference}; give run_dir="
    with pytest.raises(UserError, match=re.escape(sentence)):
        check_folder(tmp_path, load_config(["config=tiny_softmax", after]))


def test_options_of_the_same_optimizer_may_change(tmp_path: Path) -> None:
    record_config(tmp_path, load_config(["config=tiny_softmax"]))
    check_folder(tmp_path, load_config(["config=tiny_softmax", "optimizer.adamw.betas=[0.9,0.99]"]))


def test_yaml_reads_what_is_spelled() -> None:
    for value in (None, True, False, 3, 0.5, "muon", ["softmax", None], {"web": 0.5, "code": False}):
        assert yaml.safe_load(spelled(value)) == value
    assert spelled(Precision.bf16) == "bf16"


@pytest.mark.parametrize(
    ("saved", "left_out", "found"),
    [
        ([(20, 8)], [], [(20, 8)]),
        ([(20, 8), (20, 4, 21, 6)], [], [(20, 8), (20, 4, 21, 6)]),
        ([(10, 8), (20, 8)], [(10, 8)], [(10, 8), (20, 8)]),
        ([(10, 8), (20, 8)], [], []),  # step 20 was trained again, from a checkpoint before the first return
        ([(10, 8), (20, 8)], [(10, 4)], [(10, 4)]),
        ([(20, 8)], [(10, 8)], [(10, 8)]),
    ],
)
def test_a_rollback_of_another_past_is_not_read(
    saved: list[tuple[int, ...]], left_out: list[tuple[int, ...]], found: list[tuple[int, ...]], tmp_path: Path
) -> None:
    write_rollback(tmp_path, TrainState(step=20, skipped=tuple(saved)))
    assert read_rollback(tmp_path, TrainState(step=20, skipped=tuple(left_out))).skipped == tuple(found)
    assert read_rollback(tmp_path, TrainState(step=10)).skipped == ()
