"""Runs the Triton kernels for float32, and those for decoding also in float16, under the interpreter (interpreted.py): one
process for each dtype.

Prints one JSON object a case: errors against float64, and those of float32 torch with inputs and outputs in the same dtype.
"""

import json
import sys
from contextlib import contextmanager
from typing import NamedTuple
from unittest.mock import patch

import torch
import triton
import triton.language as tl
from ssscale_kernels.stickbreaking import accuracy, stickbreaking_reference
from ssscale_kernels.stickbreaking.backward import backward
from ssscale_kernels.stickbreaking.blocks import list_runs, live_blocks, lowest
from ssscale_kernels.stickbreaking.decode import decode
from ssscale_kernels.stickbreaking.forward import forward
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

from tests.kernels.interpreted import hasten

# name: (query lengths, key lengths, offsets, heads, key heads, head dim, standard deviation of q or a kind of
# `accuracy.KINDS`, bytes of scratch a row)
CASES = {
    "plain": ([130], None, None, 2, 1, 16, 1.0, 512),
    "huge": ([100], None, None, 1, 1, 16, 30.0, 512),
    "low": ([100], None, None, 1, 1, 16, -20.0, 512),
    "one": ([1], None, None, 2, 2, 16, 1.0, 512),
    "packed": ([1, 0, 65, 20], None, None, 1, 1, 24, 1.0, 512),
    "slices": ([140, 65], None, None, 1, 1, 16, 1.0, 8),
    "offset": ([20, 10], [70, 65], [50, 70], 1, 1, 16, 1.0, 512),
    # More dims than backward takes on a GPU; forward loads them in slices.
    "wide": ([70], None, None, 1, 1, 72, 1.0, 512),
    # Tiles spend 200 bits and more, and more dims than forward loads at once are multiplied.
    "in range": ([130], None, None, 1, 1, 64, "in range", 512),
}
PRECISE = ("huge", "in range")


def starts(lengths):
    return torch.tensor([0, *lengths]).cumsum(0).int()


def differentiate(dtype, q, k, v, entering, grad_o, grad_rest, layout):
    leaves = [x.to(dtype).requires_grad_() for x in (q, k, v)]
    entering = entering.to(torch.float64 if dtype == torch.float64 else torch.float32).requires_grad_()
    o, rest = stickbreaking_reference(*leaves, log_rest_in=entering, **layout)
    grads = torch.autograd.grad([o, rest], [*leaves, entering], [grad_o.to(o.dtype), grad_rest.to(rest.dtype)])
    return [x.detach().double() for x in (o, rest, *grads)]


def run(name, dtype):
    lengths_q, lengths_k, offsets, num_heads, num_kv_heads, head_dim, std, scratch = CASES[name]
    lengths_k = lengths_k or lengths_q
    num_tokens, num_keys, scale = sum(lengths_q), sum(lengths_k), head_dim**-0.5
    generator = torch.Generator().manual_seed(0)
    q, k, v, grad_o = (
        torch.randn(n, h, head_dim, generator=generator)
        for n, h in (
            (num_tokens, num_heads),
            (num_keys, num_kv_heads),
            (num_keys, num_kv_heads),
            (num_tokens, num_heads),
        )
    )
    if isinstance(std, str):
        q, k = accuracy.logits(std, q, k)
    elif std < 0:
        q, k = std * q.abs() / head_dim, k.abs()
    else:
        q = q * std
    q, k, v, grad_o = (x.to(dtype) for x in (q, k, v, grad_o))
    entering, grad_rest = (
        -torch.rand(num_tokens, num_heads, generator=generator),
        torch.randn(num_tokens, num_heads, generator=generator),
    )
    cu_q = starts(lengths_q)
    cu_k = cu_q if lengths_k is lengths_q else starts(lengths_k)
    offsets = None if offsets is None else torch.tensor(offsets, dtype=torch.int32)
    layout = {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k, "q_offsets": offsets}

    o, rest, *saved = forward(q, k, v, cu_q, cu_k, offsets, entering, max(lengths_k), scale, 0.0)
    grads = backward(
        grad_o,
        grad_rest,
        q,
        k,
        v,
        cu_q,
        cu_k,
        offsets,
        *saved,
        max(lengths_q),
        max(lengths_k),
        scale,
        0.0,
        scratch_bytes_per_row=scratch,
    )
    inputs = (q, k, v, entering, grad_o, grad_rest, layout)
    exact, torch_same = differentiate(torch.float64, *inputs), differentiate(dtype, *inputs)
    return report(("o", "log_rest", "dq", "dk", "dv", "d_log_rest_in"), (o, rest, *grads), exact, torch_same)


def report(names, ours, exact, torch_same):
    return {
        n: ((a.double() - e).abs().max().item(), (t - e).abs().max().item(), e.abs().max().item())
        for n, a, e, t in zip(names, ours, exact, torch_same)
    }


@contextmanager
def logarithms_of_a_gpu():
    """Makes log2 too large by 2^-22 of the result: lg2.approx is off by up to so much."""
    exact = InterpreterBuilder.create_log2

    def rounded(builder, x):
        y = exact(builder, x)
        return TensorHandle(y.data * y.data.dtype.type(1 + 2**-22), y.dtype)

    with patch.object(InterpreterBuilder, "create_log2", rounded):
        yield


def run_skip(dtype):
    q, k, v = (torch.randn(260, 1, 16, generator=torch.Generator().manual_seed(i)).to(dtype) for i in range(3))
    cu = starts([260])
    o, rest, _, _, stop, _ = forward(2 * q, k, v, cu, cu, None, None, 260, 0.25, 2**-12, chunk=1)
    exact, exact_rest = stickbreaking_reference(2 * q.double(), k.double(), v.double())
    same, _ = stickbreaking_reference(2 * q, k, v)
    bound = 2**-12 * v.abs().max().item()
    return {
        "o": ((o.double() - exact).abs().max().item(), (same - exact).abs().max().item(), exact.abs().max().item()),
        "allowed": bound,
        "stop": stop[0, :5, 0].tolist(),
        # Skipped keys can only lower what is left of the stick.
        "rest_is_upper_bound": bool((rest.double() >= exact_rest - 1e-3 * exact_rest.abs() - 1e-3).all()),
    }


class Decode(NamedTuple):
    """Queries [2, 0, 3] over keys [100, 50, 150], unless otherwise said, by 4 heads over 2."""

    kind: str = "normal"  # of accuracy.KINDS
    head_dim: int = 16
    queries: tuple[int, ...] = (2, 0, 3)
    entering: bool = False  # log_rest_in is given
    skip_below: float = 0.0
    splits: tuple[int, ...] = (1, 3)


DECODES = {
    "decode": Decode(splits=(1, 3, 7)),
    "decode, huge": Decode("huge"),
    "decode, low": Decode("low"),
    "decode, one-hot": Decode("one-hot"),
    "decode, edge": Decode("edge"),
    "decode, 24 dims, carried": Decode(head_dim=24, entering=True),
    "decode, 72 dims": Decode(head_dim=72),
    "decode, 128 dims": Decode(head_dim=128, queries=(1, 0, 1), splits=(2,)),
    "decode, 64 rows": Decode(queries=(17, 1, 30), splits=(2,)),
    "decode, skipping": Decode(head_dim=24, skip_below=2.0**-12),
}


def run_decode(case, dtype):
    generator = torch.Generator().manual_seed(0)
    shapes = ((sum(case.queries), 4), (300, 2), (300, 2))
    q, k, v = (torch.randn(n, h, case.head_dim, generator=generator) for n, h in shapes)
    torch.manual_seed(0)
    q, k = accuracy.logits(case.kind, q, k)
    # Half as low as in `accuracy`: weights would be too small for two parts of float16.
    q, k = (q / 2 if case.kind == "low" else q).to(dtype), k.to(dtype)
    v = v.to(dtype)
    cu_q, cu_k = starts(case.queries), starts([100, 50, 150])
    offsets = torch.tensor([98, 3, 140], dtype=torch.int32)
    entering = -torch.rand(q.shape[:2], generator=generator) if case.entering else None
    scale = case.head_dim**-0.5
    layout = {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k, "q_offsets": offsets, "scale": scale, "log_rest_in": entering}
    exact = stickbreaking_reference(q.double(), k.double(), v.double(), **layout)
    same = stickbreaking_reference(q, k, v, **layout)
    results = {"allowed": case.skip_below * v.abs().max().item()}
    sizes = (max(case.queries), 150, scale, case.skip_below)
    for splits in case.splits:
        ours = decode(q, k, v, cu_q, cu_k, offsets, entering, *sizes, num_splits=splits)
        names = ("o",) if case.skip_below else ("o", "log_rest")
        results |= {f"{n}/{splits}": r for n, r in report(names, ours, exact, same).items()}
    return results


@triton.jit
def list_runs_kernel(
    count_ptr, list_ptr, stop_ptr, cu_ptr, base, first, last, q_len, num_slots, GROUP: tl.constexpr, MAX_BLOCKS: tl.constexpr
):  # fmt: skip
    runs, exact = list_runs(
        list_ptr, (stop_ptr, cu_ptr, 0), 0, base, first, last, 5, q_len, num_slots, 64, GROUP, MAX_BLOCKS
    )  # fmt: skip
    tl.store(count_ptr, runs)
    tl.store(count_ptr + 1, exact)


def run_lists():
    """Runs of row blocks over several chunks of 64 at tile 5, against a loop."""
    wrong = 0
    flags = []
    for base, first, last, share, exact_share in (
        (0, 0, 199, 0.9, 0.1),
        (3, 5, 70, 0.5, 0.1),
        (0, 63, 65, 1.0, 0.5),
        (0, 63, 65, 1.0, 0.0),
        (0, 1, 200, 1.0, 0.1),
        (2, 9, 9, 1.0, 0.1),
    ):
        drawn = torch.rand(2, 201, generator=torch.Generator().manual_seed(last))
        exact_from = torch.where(drawn < exact_share / 2, 4, torch.where(drawn < exact_share, 5, 6))
        stop = torch.stack([torch.where(drawn < share, 0, 9), exact_from], 2).int()
        count, found = torch.zeros(2, dtype=torch.int32), torch.full((2 * 258,), -7, dtype=torch.int32)
        cu = torch.tensor([0, 200 * 64 - 5], dtype=torch.int32)
        list_runs_kernel[(1,)](count, found, stop, cu, base, first, last, 200 * 64 - 5, 201, 2, 256)
        live = [(g, b) for g in range(2) for b in range(first, last) if stop[g, b, 0] == 0]
        exact = [b for g, b in live if stop[g, b, 1] <= 5]
        fast = {g * 256 + b - base for g, b in live if stop[g, b, 1] > 5}
        wanted = [x for e in sorted(fast) for x, end in ((e, e - 1), (e, e + 1)) if end not in fast]
        wrong += found[: 2 * int(count[0])].tolist() != wanted or bool((found[len(wanted) :] != -7).any())
        flags.append(min(int(count[1]), 2))
        wrong += flags[-1] != max([0, *(1 if b < first + 2 else 2 for b in exact)])
    return {"wrong": wrong, "flags": flags}


@triton.jit
def live_blocks_kernel(
    found_ptr, stop_ptr, cu_ptr, head, start, end, q_len, num_slots, EXACT: tl.constexpr, ROWS: tl.constexpr
):
    bits, count, last = live_blocks((stop_ptr, cu_ptr, 0), head, start, end, 5, q_len, num_slots, EXACT, ROWS)
    tl.store(found_ptr, count)
    tl.store(found_ptr + 1, last)
    for i in range(count):
        tl.store(found_ptr + 2 + i, start + lowest(bits))
        bits &= bits - 1
    tl.store(found_ptr + 2 + count, bits.to(tl.int32))


def live_lists():
    """Row blocks that take each algebra at tile 5, against a loop."""
    wrong = 0
    for rows, head, start, end, share, exact_share in (
        (64, 0, 0, 199, 0.9, 0.1),
        (64, 1, 5, 70, 0.5, 0.1),
        (64, 1, 136, 200, 1.0, 0.0),
        (64, 0, 63, 65, 1.0, 0.5),
        (64, 1, 9, 9, 1.0, 0.1),
        (128, 1, 1, 99, 0.7, 0.3),
        (128, 0, 40, 100, 0.2, 0.9),
    ):
        drawn = torch.rand(2, 201, generator=torch.Generator().manual_seed(end))
        exact_from = torch.where(drawn < exact_share / 2, 4, torch.where(drawn < exact_share, 5, 6))
        stop = torch.stack([torch.where(torch.rand(2, 201) < share, 0, 9), exact_from], 2).int()
        cu = torch.tensor([0, 200 * 64 - 5], dtype=torch.int32)
        granules = stop.view(2, 201, 1, 2) if rows == 64 else stop[:, :200].view(2, 100, 2, 2)
        stop_of, exact_of = granules.amin(2).unbind(2)
        inside = [b for b in range(start, min(end, start + 64)) if stop_of[head, b] <= 5]
        for exact in (False, True):
            found = torch.full((80,), -7, dtype=torch.int32)
            live_blocks_kernel[(1,)](found, stop, cu, head, start, end, 200 * 64 - 5, 201, exact, rows)
            last = max([0, *(b + 1 for b in inside if exact_of[head, b] <= 5)])
            blocks = [b for b in inside if (exact_of[head, b] <= 5) == exact]
            wrong += found.tolist() != [len(blocks), last, *blocks, 0] + [-7] * (77 - len(blocks))
    return {"wrong": wrong}


if __name__ == "__main__":
    hasten()
    dtype = getattr(torch, sys.argv[1])
    if dtype == torch.float16:
        print(json.dumps({"case": "runs"} | run_lists()), flush=True)
        print(json.dumps({"case": "live"} | live_lists()), flush=True)
    else:
        for name in CASES:
            print(json.dumps({"case": f"{name}-{dtype}"} | run(name, dtype)), flush=True)
        with logarithms_of_a_gpu():
            for name in PRECISE:
                print(json.dumps({"case": f"{name}, precise"} | run(name, dtype)), flush=True)
        print(json.dumps({"case": f"skip-{dtype}"} | run_skip(dtype)), flush=True)
    for name, case in DECODES.items():
        print(json.dumps({"case": f"{name}-{dtype}"} | run_decode(case, dtype)), flush=True)
