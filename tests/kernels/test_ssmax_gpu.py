"""Softmax attention and SSMax on a GPU: every backend against float64, and documents that do not see each other."""

import pytest
import torch

from kernels.ssmax import rotary_attention

pytestmark = pytest.mark.gpu


def test_every_backend_against_float64():
    from kernels.ssmax.benchmark import check

    assert check()


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("window", [None, 200])
def test_a_document_does_not_see_its_neighbours(deterministic, window):
    """Forward bit for bit on every backend, gradients where they are the same from run to run."""
    from kernels.ssmax.benchmark import boundaries, inputs

    torch.manual_seed(0)
    lengths = [300, 777, 500]
    tensors = inputs(lengths, 6, 2, 64, torch.bfloat16)
    grad, qkv = tensors.pop("grad"), tensors.pop("qkv")
    cu, own = boundaries(lengths), slice(300, 1077)
    results = []
    for noise in (0.0, 1.0):
        x = qkv + noise * torch.randn_like(qkv)
        x[own] = qkv[own]
        x.requires_grad_()
        o = rotary_attention(x, 6, cu_seqlens=cu, max_seqlen=777, window=window, deterministic=deterministic, **tensors)
        results.append((o[own], torch.autograd.grad(o, x, grad)[0][own]))
    (o, dx), (other, other_dx) = results
    assert torch.equal(o, other)
    if deterministic:
        assert torch.equal(dx, other_dx)
    else:
        torch.testing.assert_close(dx, other_dx, rtol=2e-2, atol=1e-2)
