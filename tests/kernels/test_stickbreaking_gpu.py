"""Stick-breaking attention on a GPU, with 4 and 16 keys per group: float64, random cases, equal bits, memory."""

import pytest
import torch
from ssscale_kernels.stickbreaking import accuracy, fuzz, stickbreaking_attention
from ssscale_kernels.stickbreaking.accuracy import FP32, Case

pytestmark = pytest.mark.gpu

KEYS = [4, 16]


def has(dtype, keys_per_group):
    """float32 has kernels with 4 keys per group only."""
    return keys_per_group == 4 or dtype != FP32


CASES = [(keys, case) for keys in KEYS for case in accuracy.cases() if has(case.dtype, keys)]
SETTINGS = [(keys, number) for keys in KEYS for number, s in enumerate(fuzz.SETTINGS) if has(s.dtype, keys)]


@pytest.mark.parametrize(("keys", "case"), CASES, ids=str)
def test_results_and_gradients_match_float64(keys, case):
    errors = accuracy.compare(accuracy.draw(case, "cuda"), keys_per_group=keys)
    shares = {name: accuracy.share(error, case, keys) for name, error in errors.items()}
    assert all(share <= 1 for share in shares.values()), shares


@pytest.mark.parametrize(("keys", "number"), SETTINGS)
def test_random_cases_match_float64(keys, number):
    counts = fuzz.run(fuzz.SETTINGS[number], 200, number, keys)
    assert counts["results"] > 100
    assert counts["not finite"] == counts["mismatches"] == 0, counts


@pytest.mark.parametrize("keys", KEYS)
@pytest.mark.parametrize("use", ["o", "carried", "remainder"])
def test_two_runs_give_the_same_bits(keys, use):
    case = Case(head_dim=64, use=use, heads=(8, 2), lengths=(1000, 1, 0, 3000, 17000))
    inputs = accuracy.draw(case, "cuda")
    once, again = (
        accuracy.differentiate(stickbreaking_attention, inputs, skip_below=accuracy.SKIP, keys_per_group=keys)
        for _ in range(2)
    )
    for name, x in once.items():
        assert torch.equal(x, again[name]), name


def extra_bytes_per_token(num_tokens, keys):
    """Peak memory of forward and backward above the inputs, on logits so low that no stick is spent."""
    torch.manual_seed(0)
    q, k, v, grad = (torch.randn(num_tokens, 4, 64, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    q, k = accuracy.logits("low", q, k)
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    torch.autograd.grad(stickbreaking_attention(*leaves, keys_per_group=keys)[0], leaves, grad)
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / num_tokens


@pytest.mark.parametrize("keys", KEYS)
def test_memory_per_token_does_not_grow(keys):
    short, long = (extra_bytes_per_token(n, keys) for n in (16384, 65536))
    assert long <= 1.02 * short
    assert extra_bytes_per_token(16384, keys) <= 1.02 * extra_bytes_per_token(16384, 4)
