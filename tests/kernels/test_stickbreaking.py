"""The public function on the CPU, against its reference and against the definition written out."""

import pytest
import torch
from ssscale_kernels.stickbreaking import merge, ops, stickbreaking_attention, stickbreaking_reference, torch_path


def starts(*values):
    return torch.tensor(values, dtype=torch.int32)


def make(num_tokens, num_keys=None, num_heads=4, num_kv_heads=2, head_dim=8, dtype=torch.float64, std=1.0, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = (num_tokens, num_heads), (num_keys or num_tokens, num_kv_heads), (num_keys or num_tokens, num_kv_heads)
    q, k, v = (torch.randn(*shape, head_dim, generator=generator, dtype=torch.float64) for shape in shapes)
    return tuple(x.to(dtype).requires_grad_() for x in (q * std, k, v))


def values_and_gradients(function, inputs, **kwargs):
    o, rest = function(*inputs, **kwargs)
    generator = torch.Generator().manual_seed(1)
    grad_o, grad_rest = (torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x.dtype) for x in (o, rest))
    leaves = [*inputs, *(x for x in (kwargs.get("log_rest_in"),) if x is not None)]
    return [o, rest, *torch.autograd.grad([o, rest], leaves, [grad_o, grad_rest])]


def definition(q, k, v, scale):
    """One query and one key at a time, nearest first."""
    outs, rests = [], []
    for j in range(q.shape[0]):
        rest, o = torch.ones((), dtype=q.dtype), torch.zeros_like(v[0])
        for i in range(j - 1, -1, -1):
            beta = torch.sigmoid(scale * q[j] @ k[i])
            o, rest = o + rest * beta * v[i], rest * (1 - beta)
        outs.append(o)
        rests.append(rest.log())
    return torch.stack(outs), torch.stack(rests)


@pytest.mark.parametrize("function", [stickbreaking_attention, stickbreaking_reference])
def test_matches_the_definition(function):
    q, k, v = (x.detach() for x in make(9, num_heads=1, num_kv_heads=1))
    o, rest = function(q, k, v)
    exact_o, exact_rest = definition(q[:, 0], k[:, 0], v[:, 0], 8**-0.5)
    torch.testing.assert_close(o[:, 0], exact_o)
    torch.testing.assert_close(rest[:, 0], exact_rest)


LAYOUTS = {
    "plain": (33, None, {}),
    "one": (1, None, {}),
    "packed": (40, None, {"cu_seqlens_q": starts(0, 5, 5, 6, 40, 40)}),
    "uniform": (30, None, {"cu_seqlens_q": starts(0, 10, 20, 30)}),
    "offset": (7, 20, {"cu_seqlens_q": starts(0, 3, 7), "cu_seqlens_k": starts(0, 9, 20), "q_offsets": starts(9, 4)}),
    "negative offset": (12, None, {"q_offsets": starts(-3)}),
    "all keys": (5, 17, {"q_offsets": starts(50)}),
}


@pytest.mark.parametrize("std", [1.0, 30.0])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("entering", [False, True])
def test_values_and_gradients(layout, std, entering):
    num_tokens, num_keys, kwargs = LAYOUTS[layout]
    if entering:
        kwargs = kwargs | {"log_rest_in": (-torch.rand(num_tokens, 4, dtype=torch.float64)).requires_grad_()}
    inputs = make(num_tokens, num_keys, std=std)
    ours = values_and_gradients(stickbreaking_attention, inputs, **kwargs)
    exact = values_and_gradients(stickbreaking_reference, inputs, **kwargs)
    for a, b in zip(ours, exact):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("std", [1.0, 30.0, -10.0])
def test_rounding_stays_within_twice_that_of_torch(dtype, std):
    inputs = make(257, std=abs(std), dtype=dtype)
    if std < 0:
        inputs = tuple(x.detach().abs().mul(s).requires_grad_() for x, s in zip(inputs, (-1, 1, 1)))
    doubles = tuple(x.detach().double().requires_grad_() for x in inputs)
    ours, plain, exact = (
        values_and_gradients(f, x)
        for f, x in (
            (stickbreaking_attention, inputs),
            (stickbreaking_reference, inputs),
            (stickbreaking_reference, doubles),
        )
    )
    for a, p, e in zip(ours, plain, exact):
        error, allowed = ((x.double() - e).abs().max() for x in (a, p))
        assert error <= 2 * allowed + 1e-5 * (1 + e.abs().max())


def test_the_stick_is_conserved():
    q, k, _ = make(50, std=3.0)
    o, rest = stickbreaking_attention(q, k, torch.ones_like(k))
    torch.testing.assert_close(o[..., 0] + rest.exp(), torch.ones_like(rest))


def test_merge_of_near_and_far_is_the_whole():
    q, k, v = make(24)
    whole = values_and_gradients(stickbreaking_attention, (q, k, v))

    def in_two(q, k, v):
        near = stickbreaking_attention(q[10:], k[10:], v[10:])
        far = stickbreaking_attention(q[10:], k[:10], v[:10], q_offsets=starts(10))
        first = stickbreaking_attention(q[:10], k[:10], v[:10])
        o, rest = merge(near, far)
        return torch.cat([first[0], o]), torch.cat([first[1], rest])

    for a, b in zip(values_and_gradients(in_two, (q, k, v)), whole):
        torch.testing.assert_close(a, b)


def test_a_carried_rest_is_the_merge():
    q, k, v = make(14, 20)
    near = stickbreaking_attention(q, k[6:], v[6:])
    far = stickbreaking_attention(q, k[:6], v[:6], q_offsets=starts(6))
    carried = stickbreaking_attention(q, k[:6], v[:6], q_offsets=starts(6), log_rest_in=near[1])
    merged = merge(near, far)
    torch.testing.assert_close(near[0] + carried[0], merged[0])
    torch.testing.assert_close(carried[1], merged[1])


def test_decoding_gives_the_tokens_of_the_full_forward():
    q, k, v = make(32, dtype=torch.float32)
    with torch.no_grad():
        full, _ = stickbreaking_attention(q, k, v)
        last, _ = stickbreaking_attention(q[-1:], k, v, q_offsets=starts(31))
    torch.testing.assert_close(last[0], full[-1])


BAD = {
    "head dims differ": (lambda q, k, v: (q[..., :4], k, v), {}, "got q \\(6, 4, 4\\)"),
    "heads do not divide": (lambda q, k, v: (q[:, :3], k, v), {}, "multiple"),
    "head dim too large": (lambda q, k, v: tuple(x.repeat(1, 1, 17) for x in (q, k, v)), {}, "136"),
    "dtypes differ": (lambda q, k, v: (q.float(), k, v), {}, "float32"),
    "integers": (lambda q, k, v: tuple(x.int() for x in (q, k, v)), {}, "int32"),
    "device": (lambda q, k, v: tuple(x.to("meta") for x in (q, k, v)), {}, "meta"),
    "not ascending": (lambda *x: x, {"cu_seqlens_q": starts(0, 4, 3, 6)}, "\\[0, 4, 3, 6\\]"),
    "does not end at T": (lambda *x: x, {"cu_seqlens_q": starts(0, 4, 5)}, "ascend from 0 to 6"),
    "float boundaries": (lambda *x: x, {"cu_seqlens_q": torch.tensor([0.0, 6.0])}, "float32"),
    "unequal counts": (lambda *x: x, {"cu_seqlens_k": starts(0, 3, 6)}, "2 sequences"),
    "offsets": (lambda *x: x, {"q_offsets": starts(0, 0)}, "q_offsets"),
    "rest": (lambda *x: x, {"log_rest_in": torch.zeros(6, 3)}, "log_rest_in"),
    "skip": (lambda *x: x, {"skip_below": 1.5}, "1.5"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_refused_with_its_values(name):
    change, kwargs, message = BAD[name]
    q, k, v = (x.detach() for x in make(6))
    with pytest.raises(ValueError, match=message):
        stickbreaking_attention(*change(q, k, v), **kwargs)


def test_registered_operators():
    q, k, v = make(9, dtype=torch.float32)
    cu = starts(0, 4, 9)
    torch.library.opcheck(ops.forward_op, (q, k, v, cu, cu, None, None, 9, 9, 0.3, 0.0))
    plain = [x.detach() for x in (q, k, v)]
    torch.library.opcheck(ops.decode_op, (*plain, cu, cu, None, None, 9, 9, 0.3, 0.0))
    aux = ops.forward_op(*plain, cu, cu, None, None, 9, 9, 0.3, 0.0)[2:]
    assert len(aux) == ops.NUM_AUX
    torch.library.opcheck(
        ops.backward_op, (torch.randn(9, 4, 8), None, *plain, cu, cu, None, None, *aux, 9, 9, 0.3, 0.0)
    )


def test_backward_is_given_no_gradient_of_a_rest_that_nobody_uses(monkeypatch):
    given = []
    backward = torch_path.backward
    monkeypatch.setattr(torch_path, "backward", lambda *args: given.append(args[1]) or backward(*args))
    inputs = make(8, dtype=torch.float32)
    for function in (
        stickbreaking_attention,
        torch.compile(lambda *x: stickbreaking_attention(*x)[:1], backend="aot_eager"),
    ):
        o, *rest = function(*inputs)
        o.sum().backward(retain_graph=bool(rest))
        assert given.pop() is None
    o, rest = stickbreaking_attention(*inputs)
    rest.sum().backward()
    assert given.pop() is not None


def test_compiles_without_a_graph_break():
    inputs = make(16, dtype=torch.float32)

    def step(q, k, v):
        o, rest = stickbreaking_attention(2 * q, k, v, cu_seqlens_q=starts(0, 7, 16))
        return o + v.repeat_interleave(2, 1) * rest.exp()[..., None]

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    eager, traced = (torch.autograd.grad(f(*inputs).square().sum(), inputs) for f in (step, compiled))
    for a, b in zip(traced, eager):
        torch.testing.assert_close(a, b)
