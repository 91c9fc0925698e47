"""`train.compile=block` under ZeRO-3: blocks gathered as a whole and compiled compute what they do otherwise."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.pool import Pool
from tests.train.jobs import SMALL
from tests.train.same import compare

JOB = "tests.distributed.gathered_jobs:train"
RUN = "tests.distributed.gathered_jobs:pretrain"
RECOMPUTE = ["none", "selective", "full"]
INDUCTOR = "inductor" if shutil.which("g++") else "aot_eager_decomp_partition"


def equal(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether losses, the last gradient norm and all gradients agree in every bit."""
    assert len(one["gradients"]) > 10
    same = all(bool((one["gradients"][name] == found).all()) for name, found in other["gradients"].items())
    return same and bool((one["losses"] == other["losses"]).all()) and one["norm"] == other["norm"]


def largest_difference(one: dict[str, Any], other: dict[str, Any]) -> float:
    """‖g − g'‖ / ‖g'‖, the largest of all weights and of the losses."""
    pairs = [(one["losses"], other["losses"])]
    pairs += [(one["gradients"][name], found) for name, found in other["gradients"].items()]
    return max(float((a - b).norm() / b.norm()) for a, b in pairs)


def assert_freed(found: dict[str, Any], plain: dict[str, Any]) -> None:
    """Weights are whole while their block runs and freed after it, unless DeepSpeed keeps those that backward reads next."""
    assert found["whole"]
    assert found["left"] == plain["left"]
    assert found["after"] == []


@pytest.mark.parametrize("recompute", RECOMPUTE)
@pytest.mark.parametrize("core", ["softmax", "ssmax", "stickbreaking"])
def test_compiled_blocks_change_no_bit(core: str, recompute: str, pool2: Pool) -> None:
    """aot_eager runs the operators of the graphs one by one. softmax ties its embedding to the head."""
    plain = pool2.run(JOB, core=core, recompute=recompute)
    for own, found in zip(plain, pool2.run(JOB, core=core, recompute=recompute, backend="aot_eager"), strict=True):
        assert equal(own, found)
        assert_freed(found, own)
        assert 0 not in found["left"]
        assert (found["graphs"], found["breaks"]) == (2, 0)  # one serves all blocks, one is the loss


@pytest.mark.parametrize("core", ["ssmax", "stickbreaking"])
def test_gathering_whole_blocks_changes_no_more_than_rounding(core: str, pool2: Pool) -> None:
    """DeepSpeed's hooks of the modules in a block change the order in which gradients of the residual stream are added."""
    apart = pool2.run(JOB, core=core, gather=False)
    for own, found in zip(apart, pool2.run(JOB, core=core), strict=True):
        assert (own["losses"][:2] == found["losses"][:2]).all()
        assert largest_difference(found, own) <= 1e-6


@pytest.mark.parametrize("recompute", RECOMPUTE)
def test_inductor_changes_no_more_than_rounding(recompute: str, pool2: Pool) -> None:
    plain = pool2.run(JOB, core="stickbreaking", recompute=recompute)
    compiled = pool2.run(JOB, core="stickbreaking", recompute=recompute, backend=INDUCTOR)
    for own, found in zip(plain, compiled, strict=True):
        assert largest_difference(found, own) <= 1e-5
        assert_freed(found, own)
        assert (found["graphs"], found["breaks"]) == (2, 0)


def test_a_pass_without_gradients_may_come_between(pool2: Pool) -> None:
    plain = pool2.run(JOB, core="ssmax", gather=False, evaluate=True)
    for own, found in zip(plain, pool2.run(JOB, core="ssmax", backend="aot_eager", evaluate=True), strict=True):
        assert largest_difference(found, own) <= 1e-6


def test_blocks_of_tensor_parallel_ranks_hold_their_exchanges(pool4: Pool) -> None:
    plain = pool4.run(JOB, core="ssmax", tensor=2)
    for own, found in zip(plain, pool4.run(JOB, core="ssmax", tensor=2, backend="aot_eager"), strict=True):
        assert equal(own, found)
        assert_freed(found, own)


def test_saves_evaluation_observation_and_a_resume_change_no_bit(corpus: Path, tmp_path: Path, pool2: Pool) -> None:
    every = {f"train.{name}_every": 2 for name in ("eval", "save", "observe")}
    changes = SMALL | every | {"model.num_layers": 2, "train.compile": "block"}
    for name, backend, steps in (("plain", None, 4), ("whole", "aot_eager", 4), ("parts", "aot_eager", 2)):
        run = str(tmp_path / name)
        modes = pool2.run(RUN, data=str(corpus), run=run, backend=backend, **changes | {"train.max_steps": steps})
        assert modes == [["within hooks"]] * 2
    pool2.run(RUN, data=str(corpus), run=str(tmp_path / "parts"), backend="aot_eager", **changes)
    compare(tmp_path / "plain", tmp_path / "whole")
    compare(tmp_path / "whole", tmp_path / "parts")
