"""Rotation, factor and attention as one operator on the CPU, against the definition in float64."""

import pytest
import torch
from ssscale_kernels.softmax import softmax_attention
from ssscale_kernels.ssmax import ops, query_factor, rotary_attention, rotary_attention_reference, rotate


def make(lengths, num_heads, num_kv_heads, head_dim, dtype=torch.float64, rotates=True, factor="bias"):
    generator = torch.Generator().manual_seed(0)

    def draw(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    qkv = draw(sum(lengths), num_heads + 2 * num_kv_heads, head_dim).to(dtype).requires_grad_()
    wide = torch.promote_types(dtype, torch.float32)
    positions = torch.cat([torch.arange(length) for length in lengths]).double()
    inputs = {"cu_seqlens": torch.tensor([0, *lengths]).cumsum(0).int()}
    if rotates:
        angle = positions[:, None] * 10000 ** -(torch.arange(0, head_dim, 2).double() / head_dim)
        inputs |= {"cos": angle.cos().to(wide), "sin": angle.sin().to(wide)}
    if factor:
        inputs |= {
            "log_n": (positions + 1).log().to(wide).requires_grad_(),
            "s": draw(num_heads).to(wide).requires_grad_(),
        }
    if factor == "bias":
        inputs["b"] = draw(num_heads).to(wide).requires_grad_()
    return qkv, inputs


def leaves(qkv, inputs):
    return [qkv, *(inputs[name] for name in ("log_n", "s", "b") if name in inputs)]


@pytest.mark.parametrize("lengths", [[1], [7], [5, 0, 1, 9], [4, 4]])
@pytest.mark.parametrize("heads", [(4, 2), (3, 3), (4, 1)])
@pytest.mark.parametrize("factor", ["", "plain", "bias"])
@pytest.mark.parametrize(("rotates", "head_dim", "window"), [(True, 6, None), (True, 8, 3), (False, 5, None)])
def test_values_and_gradients(lengths, heads, factor, rotates, head_dim, window):
    qkv, inputs = make(lengths, *heads, head_dim, rotates=rotates, factor=factor)
    exact = rotary_attention_reference(qkv, heads[0], window=window, **inputs)
    uniform = lengths[0] if len(set(lengths)) == 1 else None
    ours = rotary_attention(qkv, heads[0], max_seqlen=max(lengths), uniform_length=uniform, window=window, **inputs)
    torch.testing.assert_close(ours, exact)
    grad = torch.randn(ours.shape, generator=torch.Generator().manual_seed(1), dtype=ours.dtype)
    wanted = leaves(qkv, inputs)
    for a, e in zip(torch.autograd.grad(ours, wanted, grad), torch.autograd.grad(exact, wanted, grad)):
        torch.testing.assert_close(a, e, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_rounding_stays_within_twice_that_of_its_parts(dtype):
    qkv, inputs = make([40, 90], 4, 2, 16, dtype)

    def run(function, dtype, **kwargs):
        wide = torch.promote_types(dtype, torch.float32)
        x = qkv.detach().to(dtype).requires_grad_()
        changed = {
            name: value.detach().to(wide).requires_grad_(value.requires_grad) if value.is_floating_point() else value
            for name, value in inputs.items()
        }
        o = function(x, 4, **changed, **kwargs)
        grad = torch.randn(o.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(o.dtype)
        return [o, *torch.autograd.grad(o, leaves(x, changed), grad)]

    def in_parts(qkv, num_heads, *, cos, sin, log_n, s, b, cu_seqlens):
        """The same attention kernel behind rotations by torch, whose gradients autograd makes."""
        q, k, v = qkv.split((num_heads, 2, 2), 1)
        q, k = rotate(q, cos, sin, query_factor(log_n, s, b)), rotate(k, cos, sin)
        return softmax_attention(q, k, v, cu_seqlens=cu_seqlens, max_seqlen=90)

    ours, plain = run(rotary_attention, dtype, max_seqlen=90), run(in_parts, dtype)
    exact = run(rotary_attention_reference, torch.float64)
    for a, p, e in zip(ours, plain, exact):
        error, allowed = ((x.double() - e).abs().max() for x in (a, p))
        assert error <= 2 * allowed + 1e-5 * (1 + e.abs().max())


def test_scaling_by_n_is_the_definition():
    """softmax((s ln n) z) = n^(s z_j) / Σ_m n^(s z_m)   (arXiv:2501.19399, Eq. 2)"""
    qkv, inputs = make([9], 1, 1, 4, rotates=False, factor="plain")
    ours = rotary_attention(qkv, 1, max_seqlen=9, **inputs)
    q, k, v = qkv[:, 0], qkv[:, 1], qkv[:, 2]
    for i in range(9):
        power = float(i + 1) ** (inputs["s"][0] * (k[: i + 1] @ q[i]) / 2)
        torch.testing.assert_close(ours[i, 0], power / power.sum() @ v[: i + 1])


def test_a_fixed_factor_costs_no_gradient():
    qkv, inputs = make([7], 2, 2, 4, factor="plain")
    fixed = {name: value.detach() if value.is_floating_point() else value for name, value in inputs.items()}
    (a,) = torch.autograd.grad(rotary_attention(qkv, 2, max_seqlen=7, **fixed).sum(), qkv)
    (b, *_) = torch.autograd.grad(rotary_attention(qkv, 2, max_seqlen=7, **inputs).sum(), leaves(qkv, inputs))
    assert torch.equal(a, b)


BAD = {
    "no keys": (lambda x: x[:, :4], {}, "\\(6, 4, 4\\) for num_heads=4"),
    "no values": (lambda x: x[:, :7], {}, "\\(6, 7, 4\\)"),
    "odd rotation": (lambda x: x[..., :3], {}, "even H, got \\(6, 2\\)"),
    "short tables": (lambda x: x, {"cos": torch.ones(5, 2), "sin": torch.ones(5, 2)}, "got \\(5, 2\\)"),
    "half the tables": (lambda x: x, {"sin": None}, "together"),
    "no s": (lambda x: x, {"s": None}, "together"),
    "s of other heads": (lambda x: x, {"s": torch.ones(3)}, "s must be \\[4\\], got \\(3,\\)"),
    "window": (lambda x: x, {"window": -1}, "got -1"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_refused_with_its_values(name):
    change, kwargs, message = BAD[name]
    qkv, inputs = make([6], 4, 2, 4, torch.float32)
    with pytest.raises(ValueError, match=message):
        rotary_attention(change(qkv.detach()), 4, **({"max_seqlen": 6} | inputs | kwargs))


@pytest.mark.parametrize("factor", ["", "plain", "bias"])
def test_registered_operators(factor):
    qkv, inputs = make([5, 3], 4, 2, 8, torch.float32, factor=factor)
    tables = [inputs.get(name) for name in ("cos", "sin", "log_n", "s", "b")]
    options = (5, None, 0.3, None, False, "auto")
    torch.library.opcheck(ops.forward_op, (qkv, *tables, inputs["cu_seqlens"], 4, *options))
    tables = [None if x is None else x.detach() for x in tables]
    outputs = ops.forward_op(qkv.detach(), *tables, inputs["cu_seqlens"], 4, *options)
    arguments = (torch.randn(8, 4, 8), qkv.detach(), *outputs, *tables, inputs["cu_seqlens"], *options)
    torch.library.opcheck(ops.backward_op, (*arguments, bool(factor), bool(factor)))


def test_compiles_without_a_graph_break():
    qkv, inputs = make([5, 3], 4, 2, 8, torch.float32)

    def step(x):
        return rotary_attention(2 * x.flatten(1).unflatten(1, (8, 8)), 4, max_seqlen=5, **inputs).square()

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    ours, eager = compiled(qkv), step(qkv)
    torch.testing.assert_close(ours, eager)
    wanted = leaves(qkv, inputs)
    for a, b in zip(torch.autograd.grad(ours.sum(), wanted), torch.autograd.grad(eager.sum(), wanted)):
        torch.testing.assert_close(a, b)
