"""The shortened step and hooks of ZeRO-3 compute what DeepSpeed's own do."""

from typing import Any

import pytest
import torch

from tests.pool import Pool

JOB = "tests.distributed.zero3_jobs:compare"
INACTIVE, ACTIVE = 1e3, 0.05  # clipping; gradient norms are about 2
CASES: dict[str, dict[str, Any]] = {
    "no clipping": {},
    "clipping that has no effect": {"clip": INACTIVE},
    "clipping": {"clip": ACTIVE},
    "bf16": {"clip": ACTIVE, "bf16": True},
    "modules": {"clip": ACTIVE, "gather": False},
    "all weights divided": {"largest_kept": 0},
    "no weight divided": {"largest_kept": 100_000},
    "NaN": {"clip": ACTIVE, "broken": 1},
    "NaN in the first step": {"broken": 0},
}
Pairs = list[dict[str, tuple[dict[str, Any], dict[str, Any]]]]


@pytest.fixture(scope="module")
def pairs(pool2: Pool) -> Pairs:
    pool2.close()
    return pool2.run(JOB, cases=CASES)


def assert_same(theirs: dict[str, Any], ours: dict[str, Any], clipped: bool) -> None:
    """The squares of n gradients are added up in fp64, in another order: the relative difference is at most n · 2⁻⁵³.

    If gradients are multiplied by 1 / norm, in fp32, the last bit of the factor may differ: 2⁻²³ in each step.
    """
    assert ours["skipped"] == theirs["skipped"]
    assert ours["norms"] == pytest.approx(theirs["norms"], rel=ours["elements"] * 2**-53, abs=0)
    assert len(theirs["states"]) > 20
    assert theirs["states"].keys() == ours["states"].keys()
    tolerance = {"rtol": 2**-19, "atol": 1e-7} if clipped else {"rtol": 0, "atol": 0}
    torch.testing.assert_close(ours["losses"], theirs["losses"], **tolerance)
    torch.testing.assert_close(ours["states"], theirs["states"], **tolerance)


@pytest.mark.parametrize("name", CASES)
def test_steps_change_no_bit(name: str, pairs: Pairs) -> None:
    case = CASES[name]
    for found in pairs:
        theirs, ours = found[name]
        assert_same(theirs, ours, clipped=case.get("clip") == ACTIVE)
        assert [step for step, skipped in enumerate(ours["skipped"]) if skipped] == [
            step for step in (case.get("broken"),) if step is not None
        ]
        assert ours["reductions"] == 1


def test_clipping_has_an_effect(pairs: Pairs) -> None:
    """Norms of about 2 are clipped to 0.05, so that first moments become 40 times as small."""
    free, limited = (pairs[0][name][1]["states"] for name in ("no clipping", "clipping"))
    assert 10 * limited["embedding.weight", "exp_avg"].norm() < free["embedding.weight", "exp_avg"].norm()


def test_tensor_parallel_ranks_count_common_weights_once(pool4: Pool) -> None:
    pool4.close()
    cases = {"free": {"tensor": 2}, "clipped": {"tensor": 2, "clip": ACTIVE}, "NaN": {"tensor": 2, "broken": 1}}
    for found in pool4.run(JOB, cases=cases):
        for name, (theirs, ours) in found.items():
            assert_same(theirs, ours, clipped=name == "clipped")
            assert sum(ours["skipped"]) == (name == "NaN")
