"""The public function on the Triton kernels, by autograd, in the interpreter: both algebras, every option, planted mistakes."""

import math

import pytest
import torch
from ssscale_kernels.stickbreaking import accuracy, ops
from ssscale_kernels.stickbreaking.accuracy import Error
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.kernels.interpreted import run_interpreted
from tests.kernels.operator_interpreted import ALL, CASES, MUTATIONS


@pytest.fixture(scope="module")
def sixteen():
    # Two processes, because each takes seconds to start.
    return run_interpreted("operator_interpreted.py", "16/options,16/scaled,others", "16/logits,mutations")


@pytest.fixture(scope="module")
def four():
    return run_interpreted("operator_interpreted.py", *(f"4/{group}" for group in CASES))


def worst(name, result, times=1.0):
    """The largest error in units of what is allowed, infinite for NaN."""
    # "scaled" is for results in bf16, which round eight times as coarsely as float16.
    times *= 1.5 if name.startswith("scaled") else 1.0
    shares = [accuracy.share(Error(*error), ALL.get(name, accuracy.Case()), 16) for error in result.values()]
    return max(math.inf if math.isnan(x) else x for x in shares) / times


@pytest.mark.parametrize("case", ALL)
def test_16_keys_per_group_match_float64(sixteen, case):
    assert worst(case, sixteen[f"16 {case}"]) <= 1, sixteen[f"16 {case}"]


@pytest.mark.slow
@pytest.mark.parametrize("case", ALL)
def test_4_keys_per_group_match_float64(four, case):
    assert worst(case, four[f"4 {case}"]) <= 1, four[f"4 {case}"]


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_planted_mistakes_are_noticed(sixteen, mutation):
    assert worst(MUTATIONS[mutation][3], sixteen[mutation]) > 2


def test_nearer_keys_then_farther_ones_are_all_keys_and_the_same_bits_twice(sixteen):
    result = dict(sixteen["in two"])
    assert result.pop("same_bits")
    assert worst("in two", result, times=2) <= 1  # two results are rounded and added


def test_both_algebras_save_the_same_and_fake_tensors_know_it(sixteen):
    saved = sixteen["saved"]
    for dtype in (torch.float16, torch.float32):
        assert saved[f"{dtype} 4"] == saved[f"{dtype} 16"]
        with FakeTensorMode():
            q = torch.empty(71, 2, 16, dtype=dtype, device="cuda")
            cu = torch.empty(4, dtype=torch.int32, device="cuda")
            k = torch.empty(71, 1, 16, dtype=dtype, device="cuda")
            fake = ops.forward_op(q, k, k, cu, cu, None, None, 66, 66, 0.25, 0.0, 16)
        assert [[list(x.shape), str(x.dtype)] for x in fake] == saved[f"{dtype} 16"]


@pytest.mark.slow
def test_random_cases_match_float64():
    found = run_interpreted("operator_interpreted.py", "fuzz")["fuzz"]
    assert len(found) == 4
    for counts in found.values():
        assert counts["results"] > 5
        assert counts["not finite"] == counts["mismatches"] == 0
