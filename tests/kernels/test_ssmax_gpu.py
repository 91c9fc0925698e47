"""Softmax attention and SSMax on a GPU: every backend against float64, and documents that do not see each other."""

import pytest
import torch
from ssscale_kernels.softmax import merge, rectangle
from ssscale_kernels.softmax.documents import Rectangles
from ssscale_kernels.ssmax import rotary_attention

pytestmark = pytest.mark.gpu


def test_every_backend_against_float64():
    from ssscale_kernels.ssmax.benchmark import check

    assert check()


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("window", [None, 200])
def test_a_document_does_not_see_its_neighbours(deterministic, window):
    """Forward bit for bit on every backend, gradients where they are the same from run to run."""
    from ssscale_kernels.ssmax.benchmark import boundaries, inputs

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


PARTS = {
    "one": ((0, 512, 0, 300),),
    "second chunks": ((300, 500, 100, 1000), (1500, 2000, 1100, 2000)),
    "ragged": ((17, 300, 128, 129), (512, 512, 0, 0), (1024, 1025, 900, 1536), (1600, 2048, 1999, 2048)),
}


@pytest.mark.parametrize("name", PARTS)
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), [(4, 4, 64), (6, 2, 128), (3, 1, 40)])
def test_rectangles_against_float64(name, deterministic, num_heads, num_kv_heads, head_dim):
    """Part of the keys after another part of them; what no rectangle names is not touched."""
    torch.manual_seed(0)
    shapes = (num_heads, num_kv_heads, num_kv_heads, num_heads, num_heads)
    q, k, v, grad, first = (torch.randn(2048, n, head_dim, device="cuda").bfloat16() for n in shapes)
    rectangles, scale = Rectangles(PARTS[name], 600, 1000), head_dim**-0.5
    o, lse = first.float(), torch.randn(2048, num_heads, device="cuda")
    before = [o.double().cpu(), lse.double().cpu()]
    merge.merge_(o, lse, *rectangle.forward(q, k, v, rectangles, scale, deterministic))
    grads = rectangle.backward(grad, q, k, v, o.bfloat16(), lse, rectangles, scale, deterministic)
    wide = [x.double().cpu() for x in (q, k, v, grad)]
    merge.merge_(*before, *rectangle.forward(*wide[:3], rectangles, scale, False))
    exact = rectangle.backward(wide[3], *wide[:3], *before, rectangles, scale, False)
    torch.testing.assert_close(o.double().cpu(), before[0], rtol=0, atol=2e-2)
    torch.testing.assert_close(lse.double().cpu(), before[1], rtol=0, atol=1e-3)
    for ours, wanted in zip(grads, exact):
        error = (ours.double().cpu() - wanted).abs().max()
        assert error <= 2e-2 * (1 + wanted.abs().max())
        assert not ours.cpu()[(wanted == 0).flatten(1).all(1)].any()
