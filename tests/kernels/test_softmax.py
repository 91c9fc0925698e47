"""Softmax attention on packed documents on the CPU, against the definition in float64."""

import pytest
import torch
from ssscale_kernels.buckets import bucket
from ssscale_kernels.softmax import ops, softmax_attention
from ssscale_kernels.softmax.backends import choose_backend
from ssscale_kernels.softmax.cudnn_graphs import _shape
from ssscale_kernels.softmax.documents import Documents
from torch.nn.functional import scaled_dot_product_attention


def starts(*values):
    return torch.tensor(values, dtype=torch.int32)


def make(num_tokens, num_heads=4, num_kv_heads=2, head_dim=8, dtype=torch.float64, std=1.0):
    generator = torch.Generator().manual_seed(0)
    shapes = (num_tokens, num_heads), (num_tokens, num_kv_heads), (num_tokens, num_kv_heads)
    q, k, v = (torch.randn(*shape, head_dim, generator=generator, dtype=torch.float64) for shape in shapes)
    return tuple(x.to(dtype).requires_grad_() for x in (q * std, k, v))


def definition(q, k, v, cu_seqlens, scale, window=None):
    """One query at a time; also lse."""
    outs, sums = torch.zeros_like(q), torch.zeros(q.shape[:2], dtype=q.dtype)
    group = q.shape[1] // k.shape[1]
    bounds = cu_seqlens.tolist()
    for start, stop in zip(bounds, bounds[1:]):
        for i in range(start, stop):
            first = start if window is None else max(start, i - window + 1)
            for n in range(q.shape[1]):
                z = scale * k[first : i + 1, n // group] @ q[i, n]
                outs[i, n] = z.softmax(0) @ v[first : i + 1, n // group]
                sums[i, n] = z.logsumexp(0)
    return outs, sums


LAYOUTS = {
    "plain": ((0, 23), None),
    "one": ((0, 1), None),
    "packed": ((0, 0, 5, 5, 6, 24, 24), None),
    "uniform": ((0, 10, 20, 30), 10),
}


@pytest.mark.parametrize("window", [None, 1, 4, 100])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_values_gradients_and_lse(layout, window):
    bounds, uniform = LAYOUTS[layout]
    inputs = make(bounds[-1])
    cu = starts(*bounds)
    ours, lse = softmax_attention(
        *inputs, cu_seqlens=cu, max_seqlen=bounds[-1], uniform_length=uniform, window=window, scale=0.3, return_lse=True
    )
    exact, exact_lse = definition(*inputs, cu, 0.3, window)
    grad = torch.randn(ours.shape, generator=torch.Generator().manual_seed(1), dtype=ours.dtype)
    torch.testing.assert_close(ours, exact)
    torch.testing.assert_close(lse, exact_lse)
    assert not lse.requires_grad
    for a, b in zip(torch.autograd.grad(ours, inputs, grad), torch.autograd.grad(exact, inputs, grad)):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("std", [1.0, 30.0])
def test_rounding_stays_within_twice_that_of_torch(dtype, window, std):
    inputs, cu = make(130, dtype=dtype, std=std), starts(0, 70, 130)

    def run(inputs):
        o = softmax_attention(*inputs, cu_seqlens=cu, max_seqlen=70, window=window)
        grad = torch.randn(o.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        return [o, *torch.autograd.grad(o, inputs, grad.to(o.dtype))]

    def plain(q, k, v):
        """torch's attention, which rounds the weights to 16 bits; with a window float32 inside."""
        if window is None:
            k, v = (x.repeat_interleave(2, 1) for x in (k, v))
            parts = ([x[a:b].transpose(0, 1)[None] for x in (q, k, v)] for a, b in ((0, 70), (70, 130)))
            outs = [scaled_dot_product_attention(*part, is_causal=True)[0].transpose(0, 1) for part in parts]
            return torch.cat(outs)
        q32, k32, v32 = (x.float().repeat_interleave(4 // x.shape[1], 1).transpose(0, 1) for x in (q, k, v))
        i = torch.arange(130)
        document = (i >= 70).long()
        seen = (document[:, None] == document) & (i[:, None] >= i)
        seen &= i[:, None] - i < window
        z = (q32 @ k32.transpose(1, 2)) * 8**-0.5
        return (z.masked_fill(~seen, -torch.inf).softmax(-1) @ v32).transpose(0, 1).to(q.dtype)

    o = plain(*inputs)
    grad = torch.randn(o.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    same = [o, *torch.autograd.grad(o, inputs, grad.to(dtype))]
    exact = run(tuple(x.detach().double().requires_grad_() for x in inputs))
    for a, p, e in zip(run(inputs), same, exact):
        error, allowed = ((x.double() - e).abs().max() for x in (a, p))
        assert error <= 2 * allowed + 1e-5 * (1 + e.abs().max())


def test_a_document_does_not_see_its_neighbours():
    cu = starts(0, 20, 31, 60)
    inputs = make(60, dtype=torch.float32)
    other = tuple(x.detach().clone() for x in inputs)
    for x in other:
        x[:20] += 1
        x[31:] *= 2
    results = []
    for q, k, v in (inputs, tuple(x.requires_grad_() for x in other)):
        o = softmax_attention(q, k, v, cu_seqlens=cu, max_seqlen=29)
        results.append([o, *torch.autograd.grad(o.sum(), (q, k, v))])
    for a, b in zip(*results):
        assert torch.equal(a[20:31], b[20:31])


BAD = {
    "head dims differ": (lambda q, k, v: (q[..., :4], k, v), {}, "got q \\(6, 4, 4\\)"),
    "tokens differ": (lambda q, k, v: (q[:3], k, v), {}, "got q \\(3, 4, 8\\)"),
    "heads do not divide": (lambda q, k, v: (q[:, :3], k, v), {}, "multiple"),
    "head dim too large": (lambda q, k, v: tuple(x.repeat(1, 1, 17) for x in (q, k, v)), {}, "136"),
    "dtypes differ": (lambda q, k, v: (q.float(), k, v), {}, "float32"),
    "integers": (lambda q, k, v: tuple(x.int() for x in (q, k, v)), {}, "int32"),
    "device": (lambda q, k, v: tuple(x.to("meta") for x in (q, k, v)), {}, "meta"),
    "not ascending": (lambda *x: x, {"cu_seqlens": starts(0, 4, 3, 6)}, "\\[0, 4, 3, 6\\]"),
    "does not end at T": (lambda *x: x, {"cu_seqlens": starts(0, 4, 5)}, "ascend from 0 to 6"),
    "float boundaries": (lambda *x: x, {"cu_seqlens": torch.tensor([0.0, 6.0])}, "float32"),
    "no boundaries": (lambda *x: x, {"cu_seqlens": starts(0)}, "\\(1,\\)"),
    "window": (lambda *x: x, {"window": 0}, "got 0"),
    "uniform": (lambda *x: x, {"uniform_length": 4}, "uniform_length=4 must divide the 6"),
    "max_seqlen": (lambda *x: x, {"max_seqlen": 0}, "got 0"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_refused_with_its_values(name):
    change, kwargs, message = BAD[name]
    q, k, v = (x.detach() for x in make(6))
    with pytest.raises(ValueError, match=message):
        softmax_attention(*change(q, k, v), **({"cu_seqlens": starts(0, 6), "max_seqlen": 6} | kwargs))


@pytest.mark.parametrize("window", [None, 3])
def test_registered_operators(window):
    q, k, v = make(9, dtype=torch.float32)
    options = (starts(0, 4, 9), 5, None, 0.3, window, False, "auto")
    torch.library.opcheck(ops.forward_op, (q, k, v, *options))
    plain = [x.detach() for x in (q, k, v)]
    o, lse = ops.forward_op(*plain, *options)
    torch.library.opcheck(ops.backward_op, (torch.randn_like(o), *plain, o, lse, *options))


def test_backends():
    """What runs where, without such a machine."""
    cpu, gpu = torch.device("cpu"), torch.device("cuda", 0)
    assert choose_backend(cpu, torch.float32, 64, 4096, None, False) == "cpu"
    assert choose_backend(cpu, torch.float32, 64, 4096, 512, False) == "exact"
    assert choose_backend(gpu, torch.float32, 64, 4096, None, False) == "exact"
    assert choose_backend(gpu, torch.bfloat16, 20, 4096, None, False) == "exact"
    assert choose_backend(gpu, torch.bfloat16, 64, 4096, None, True) == "varlen"
    assert choose_backend(gpu, torch.bfloat16, 64, 100, None, False) == "varlen"
    assert choose_backend(gpu, torch.bfloat16, 64, 4096, None, False, "flash") == "varlen"
    assert choose_backend(cpu, torch.float32, 64, 4096, None, False, "cudnn") == "cpu"
    with pytest.raises(ValueError, match="backend=cudnn has no deterministic gradients"):
        choose_backend(gpu, torch.bfloat16, 64, 4096, None, True, "cudnn")
    with pytest.raises(ValueError, match="backend=flash takes bf16"):
        choose_backend(gpu, torch.float32, 64, 4096, None, False, "flash")


def test_plans_are_built_for_buckets():
    """Batches of one bucket share a plan; what a batch's collation pads to is a bucket."""
    assert [bucket(n) for n in (2, 16, 17, 33, 65, 128, 129)] == [16, 16, 20, 40, 80, 128, 160]
    assert all(n <= bucket(n) == bucket(bucket(n)) <= max(16, 1.25 * n) for n in range(1, 5000))
    q, k, v = (x.detach() for x in make(600))

    def shape(boundaries, longest, uniform=None, window=None):
        return _shape(q, k, v, Documents(starts(*[0] * boundaries), longest, uniform, 0.1, window, False))

    assert shape(3, 300) == shape(9, 511) != shape(9, 513)
    assert shape(3, 300).length == 512
    assert shape(3, 300).num_documents == 15
    assert shape(3, 300, window=512) == shape(3, 300)
    assert shape(4, 200, uniform=200)[2:4] == (3, 200)
    assert shape(7, 100, uniform=100).ragged, "short documents of one length share the ragged plan"
