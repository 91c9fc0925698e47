"""The public function on the Triton kernels, by autograd, in the interpreter: every option, planted mistakes."""

import math

import pytest
import torch
from ssscale_kernels.stickbreaking import accuracy, ops
from ssscale_kernels.stickbreaking.accuracy import Error
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.kernels.interpreted import run_interpreted
from tests.kernels.operator_interpreted import ALL, MUTATIONS


@pytest.fixture(scope="module")
def interpreted():
    # Few processes, because each takes seconds to start.
    return run_interpreted("operator_interpreted.py", "options,others", "logits", "bfloat16,mutations")


def worst(result, times=1.0):
    """The largest error in units of what is allowed, infinite for NaN."""
    shares = [accuracy.share(Error(*error)) for error in result.values()]
    return max(math.inf if math.isnan(x) else x for x in shares) / times


@pytest.mark.parametrize("case", ALL)
def test_results_and_gradients_match_float64(interpreted, case):
    assert worst(interpreted[case]) <= 1, interpreted[case]


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_planted_mistakes_are_noticed(interpreted, mutation):
    assert worst(interpreted[mutation]) > 2


def test_nearer_keys_then_farther_ones_are_all_keys_and_the_same_bits_twice(interpreted):
    result = dict(interpreted["in two"])
    assert result.pop("same_bits")
    assert worst(result, times=2) <= 1  # two results are rounded and added


def test_gradients_scale_with_those_of_the_results(interpreted):
    """A mean over the tokens of a step makes gradients so small that fp16 would round them to zero."""
    assert len(interpreted["scaled"]) == 8
    assert all(interpreted["scaled"].values()), interpreted["scaled"]


def test_fake_tensors_are_like_what_forward_saves(interpreted):
    for dtype in (torch.float16, torch.float32):
        with FakeTensorMode():
            q = torch.empty(71, 2, 16, dtype=dtype, device="cuda")
            cu = torch.empty(4, dtype=torch.int32, device="cuda")
            k = torch.empty(71, 1, 16, dtype=dtype, device="cuda")
            fake = ops.forward_op(q, k, k, cu, cu, None, None, 66, 66, 0.25, 0.0)
        assert [[list(x.shape), str(x.dtype)] for x in fake] == interpreted["saved"][str(dtype)]


@pytest.mark.slow
def test_random_cases_match_float64():
    found = run_interpreted("operator_interpreted.py", "fuzz")["fuzz"]
    assert len(found) == 4
    for counts in found.values():
        assert counts["results"] > 5
        assert counts["not finite"] == counts["mismatches"] == 0
