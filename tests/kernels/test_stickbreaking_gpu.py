"""Stick-breaking attention on a GPU: float64, random cases, equal bits, memory."""

import pytest
import torch
from ssscale_kernels.stickbreaking import accuracy, fuzz, stickbreaking_attention
from ssscale_kernels.stickbreaking.accuracy import Case

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("case", accuracy.cases(), ids=str)
def test_results_and_gradients_match_float64(case):
    errors = accuracy.compare(accuracy.draw(case, "cuda"))
    shares = {name: accuracy.share(error) for name, error in errors.items()}
    assert all(share <= 1 for share in shares.values()), shares


@pytest.mark.parametrize("number", range(len(fuzz.SETTINGS)))
def test_random_cases_match_float64(number):
    counts = fuzz.run(fuzz.SETTINGS[number], 200, number)
    assert counts["results"] > 100
    assert counts["not finite"] == counts["mismatches"] == 0, counts


@pytest.mark.parametrize("use", ["o", "carried", "remainder"])
def test_two_runs_give_the_same_bits(use):
    case = Case(head_dim=64, use=use, heads=(8, 2), lengths=(1000, 1, 0, 3000, 17000))
    inputs = accuracy.draw(case, "cuda")
    once, again = (accuracy.differentiate(stickbreaking_attention, inputs, skip_below=accuracy.SKIP) for _ in range(2))
    for name, x in once.items():
        assert torch.equal(x, again[name]), name


@pytest.mark.parametrize("factor", [2.0**-40, 2.0**20])
@pytest.mark.parametrize("use", ["log_rest", "carried", "remainder"])
def test_gradients_scale_with_those_of_the_results(use, factor):
    """A mean over the tokens of a step makes gradients so small that fp16 would round them to zero."""
    inputs = accuracy.draw(Case(head_dim=64, use=use), "cuda")
    scaled = inputs._replace(
        grad_o=factor * inputs.grad_o, grad_rest=None if inputs.grad_rest is None else factor * inputs.grad_rest
    )
    once, again = (accuracy.differentiate(stickbreaking_attention, x, skip_below=0.0) for x in (inputs, scaled))
    for name, x in once.items():
        if name == "d_log_rest_in":  # float32, which shows roundings of the scales
            torch.testing.assert_close(again[name], factor * x, rtol=1e-5, atol=1e-5 * factor)
        else:
            assert torch.equal(factor * x if name.startswith("d_") else x, again[name]), name


def extra_bytes_per_token(num_tokens):
    """Peak memory of forward and backward above the inputs, on logits so low that no stick is spent."""
    torch.manual_seed(0)
    q, k, v, grad = (torch.randn(num_tokens, 4, 64, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    q, k = accuracy.logits("low", q, k)
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    torch.autograd.grad(stickbreaking_attention(*leaves)[0], leaves, grad)
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / num_tokens


def test_memory_per_token_does_not_grow():
    short, long = (extra_bytes_per_token(n) for n in (16384, 65536))
    assert long <= 1.02 * short
