"""Runs the kernels around softmax attention (rotation, merge) under Triton's interpreter, in a process of its own.

TRITON_INTERPRET=1 chooses the interpreter when Triton is imported. Prints one JSON object per case: errors against
float64, and those of float32 torch with inputs and outputs in the same dtype.
"""

import json

import torch
from ssscale_kernels.softmax import merge
from ssscale_kernels.ssmax import rotary, rotate
from ssscale_kernels.ssmax.reference import query_factor

from tests.kernels.interpreted import hasten

# name: (tokens, heads, key heads, head dim, rotate, factor, bias)
CASES = {
    "rope": (37, 4, 4, 16, True, False, False),
    "ssmax": (37, 4, 4, 16, True, True, False),
    "bias": (130, 4, 4, 16, True, True, True),
    "grouped": (9, 6, 2, 12, True, True, True),
    "one key head": (9, 3, 1, 20, True, True, True),
    "nope, odd": (11, 3, 3, 7, False, True, True),
    "one token": (1, 8, 8, 32, True, True, False),
}


def run(name, dtype):
    total, num_heads, num_kv_heads, head_dim, rotates, has_factor, has_bias = CASES[name]
    generator = torch.Generator().manual_seed(0)

    def draw(*shape):
        return torch.randn(*shape, generator=generator)

    heads = num_heads + 2 * num_kv_heads
    # The tokens of the projection may be slices of wider ones.
    qkv = torch.full((total, heads * head_dim + 8), float("nan"), dtype=dtype)[:, : heads * head_dim]
    qkv = qkv.unflatten(1, (heads, head_dim))
    qkv.copy_(draw(total, heads, head_dim))
    grads = [draw(total, n, head_dim).to(dtype) for n in (num_heads, num_kv_heads)]
    angle = draw(total, head_dim // 2) * 100
    cos, sin = (angle.cos(), angle.sin()) if rotates else (None, None)
    log_n, s, b = (draw(total).abs(), draw(num_heads), draw(num_heads)) if has_factor else (None, None, None)
    b = b if has_bias else None

    q, k = rotary.forward(qkv, num_heads, cos, sin, log_n, s, b)
    dqkv = torch.full_like(qkv, float("nan"))
    dqkv[:, num_heads + num_kv_heads :] = 1.0
    backward = (*grads, qkv, dqkv, cos, sin, log_n, s, b, has_factor, has_factor)
    dlog_n, ds, db = rotary.backward(*backward)
    again = rotary.backward(*backward)
    assert all(torch.equal(x, y) for x, y in zip((dlog_n, ds, db), again))
    assert (dqkv[:, num_heads + num_kv_heads :] == 1.0).all(), "the values' gradient was touched"
    ours = [q, k, dqkv[:, :num_heads], dqkv[:, num_heads : num_heads + num_kv_heads]]
    names = ["q", "k", "dq", "dk", *(n for n, x in (("dlog_n", log_n), ("ds", s), ("db", b)) if x is not None)]
    ours += [g for g, x in ((dlog_n, log_n), (ds, s), (db, b)) if x is not None]

    def torch_path(wide):
        leaves = [None if x is None else x.to(wide).requires_grad_() for x in (log_n, s, b)]
        x, y = (
            part.detach().to(wide if wide == torch.float64 else dtype).requires_grad_()
            for part in (qkv[:, :num_heads], qkv[:, num_heads : num_heads + num_kv_heads])
        )
        tables = [None if t is None else t.to(wide) for t in (cos, sin)]
        outs = [rotate(x, *tables, query_factor(*leaves)), rotate(y, *tables)]
        wanted = [x, y, *(leaf for leaf in leaves if leaf is not None)]
        return [*outs, *torch.autograd.grad(outs, wanted, [g.to(out.dtype) for g, out in zip(grads, outs)])]

    exact, same = torch_path(torch.float64), torch_path(torch.float32)
    return {
        n: ((a.double() - e).abs().max().item(), (t.double() - e).abs().max().item(), e.abs().max().item())
        for n, a, e, t in zip(names, ours, exact, same)
    }


def run_merge(dtype):
    """Parts over 5 and 3 keys; the second query sees only the first part, and o there is not touched."""
    generator = torch.Generator().manual_seed(0)
    z = 5 * torch.randn(3, 7, 8, generator=generator, dtype=torch.float64)
    v = torch.randn(8, 20, generator=generator, dtype=torch.float64)
    z[1, :, 5:] = -torch.inf
    o, part = (z[..., keys].softmax(-1).nan_to_num() @ v[keys] for keys in (slice(5), slice(5, 8)))
    lse, lse_part = (z[..., keys].logsumexp(-1) for keys in (slice(5), slice(5, 8)))
    part[1] = torch.nan
    given = [o.float(), lse.float(), part.to(dtype), lse_part.float()]
    same = [x.clone() for x in given]
    merge.merge_kernel[(1,)](*given, 21, H=20, BH=32)
    merge.merge_(*same)
    assert torch.equal(given[0][1], o[1].float())
    exact = z.softmax(-1) @ v, z.logsumexp(-1)
    pairs = zip(("o", "lse"), given, same, exact)
    return {n: [*((x - e).abs().max().item() for x in (a, t)), e.abs().max().item()] for n, a, t, e in pairs}


if __name__ == "__main__":
    hasten()
    for dtype in (torch.float16, torch.float32):
        print(json.dumps({"case": f"merge-{dtype}"} | run_merge(dtype)), flush=True)
        for name in CASES:
            print(json.dumps({"case": f"{name}-{dtype}"} | run(name, dtype)), flush=True)
