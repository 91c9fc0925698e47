"""Compares the forms for Hopper with the others, bit for bit, and times both.

python -m ssscale_kernels.stickbreaking.hopper_check bits PART SECONDS    PART: 0 to 3
python -m ssscale_kernels.stickbreaking.hopper_check time
"""

import random
import sys
import time
from functools import partial

import torch
from ssscale_kernels.stickbreaking import accuracy, fuzz
from ssscale_kernels.stickbreaking import backward as backward_module
from ssscale_kernels.stickbreaking import forward as forward_module
from ssscale_kernels.stickbreaking.benchmark import graph_ms, make
from ssscale_kernels.stickbreaking.candidates import SKIP, backward_call, forward_call
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from torch.profiler import ProfilerActivity, profile

BF16 = torch.bfloat16
SETTINGS = [
    fuzz.Setting(BF16, 64, 1, 2, False, False),
    fuzz.Setting(BF16, 64, 8, 1, True, True),
    fuzz.Setting(BF16, 64, 2, 2, True, False),
    fuzz.Setting(BF16, 64, 1, 1, False, True),
]
SHAPES = [(4, 24, 4096, 64), (1, 24, 16384, 64)]


def same(a, b):
    return (
        torch.equal(a.nan_to_num(7e4, 6e4, -6e4), b.nan_to_num(7e4, 6e4, -6e4))
        if a.is_floating_point()
        else torch.equal(a, b)
    )


def bits(part, seconds):
    setting, rng, calls, different = SETTINGS[part], random.Random(part), 0, 0
    until = time.time() + seconds
    while calls < 6 or time.time() < until:
        case = fuzz.draw(setting, rng, "cuda", rng.choice((200, 900, 5000)))
        x = accuracy.draw(case, "cuda", rng.randrange(1 << 30))
        cu_q = x.layout["cu_seqlens_q"]
        cu_k, offsets = x.layout.get("cu_seqlens_k"), x.layout.get("q_offsets")
        cu_k = cu_q if cu_k is None else cu_k
        if x.k.shape[0] < 64 or x.q.shape[0] < 64:
            continue
        max_q, max_k = (int((cu[1:] - cu[:-1]).max()) for cu in (cu_q, cu_k))
        scale = setting.head_dim**-0.5
        torch.use_deterministic_algorithms(True, warn_only=True)  # fills uninitialised memory with NaN
        given = (x.q, x.k, x.v, cu_q, cu_k, offsets, x.log_rest_in, max_k, scale, x.skip_below)
        forwards = [forward_module.forward(*given, max_queries=max_q, overlap=o) for o in (True, False)]
        saved, per_row = forwards[1][2:], rng.choice((64, 256, 2048))
        rest = None if x.grad_rest is None else x.grad_rest
        given = (x.grad_o, rest, x.q, x.k, x.v, cu_q, cu_k, offsets, *saved, max_q, max_k, scale, x.skip_below)
        backwards = [backward_module.backward(*given, scratch_bytes_per_row=per_row, overlap=o) for o in (True, False)]
        torch.use_deterministic_algorithms(False)
        torch.cuda.synchronize()
        calls += 1
        names = ("o", "log_rest", "row_carry", "row_tile", "block_stop", "maxima", "dq", "dk", "dv", "d_rest_in")
        pairs = zip((*forwards[0], *backwards[0]), (*forwards[1], *backwards[1]), strict=True)
        wrong = [name for name, (a, b) in zip(names, pairs, strict=True) if not same(a, b)]
        if wrong:
            different += 1
            if different < 10:
                print("DIFFERENT", wrong, case, per_row, flush=True)
    print(f"{tuple(setting)}: {calls} calls, {different} different", flush=True)


def mixed(shape):
    _, heads, _, head_dim = shape
    q, k, v, grad = make(*shape, True)
    q, k = 0.3 * q.float(), k.float()
    q[..., 0], k[..., 0] = torch.linspace(-4, 6, heads, device="cuda")[None] * -1.5 * head_dim**0.5, 1.0
    return [x.bfloat16().contiguous() for x in (q, k, v, grad)]


def kernels(calls):
    for call in calls:
        call()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        for call in calls * 2:
            call()
        torch.cuda.synchronize()
    return {
        e.key.split("_kernel")[0]: round(e.device_time_total / e.count)
        for e in found.key_averages()
        if "_kernel" in e.key
    }


def timing():
    for shape in SHAPES:
        batch, heads, length, head_dim = shape
        inputs = {"dense": [make(*shape, False) for _ in range(3)], "spent": [make(*shape, True) for _ in range(3)]}
        inputs["mixed"] = [mixed(shape) for _ in range(3)]
        for backend in (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION):
            with sdpa_kernel(backend):
                four = [
                    [x.view(batch, length, heads, head_dim).transpose(1, 2) for x in y[:3]] for y in inputs["dense"]
                ]
                ms = [
                    graph_ms([partial(scaled_dot_product_attention, *x, is_causal=True) for x in four])
                    for _ in range(2)
                ]
            print(shape, str(backend), "forward", ms, flush=True)
        for kind, some in inputs.items():
            for overlap in (False, True, False, True):
                forward = [forward_call(shape, x, overlap=overlap) for x in some]
                saved = [call()[2:] for call in forward]
                backward = [backward_call(shape, x, s, overlap=overlap) for x, s in zip(some, saved, strict=True)]
                ms = [round(graph_ms(calls), 4) for calls in (forward, backward)]
                print(
                    shape,
                    kind,
                    "Gluon" if overlap else "Triton",
                    "forward, backward ms",
                    ms,
                    kernels(forward + backward),
                    flush=True,
                )


if __name__ == "__main__":
    assert SKIP
    if sys.argv[1] == "bits":
        bits(int(sys.argv[2]), float(sys.argv[3]))
    else:
        timing()
