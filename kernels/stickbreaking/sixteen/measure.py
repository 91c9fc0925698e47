"""python -m ssscale_kernels.stickbreaking.sixteen.measure: checks the kernels with 16 keys per thread, then times them.

Needs a CUDA GPU, and 16 CPU cores to stay under 8 minutes. First, processes side by side compile every kernel that will
run. Then come results against float64, launch settings, and one table beside FlashAttention-2, cuDNN's attention and
the kernels with four keys per group: medians of the GPU's time over replays of CUDA graphs, in ms.
"""

import argparse
import itertools
import os
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial

import torch
import triton
from ssscale_kernels.stickbreaking import backward as four_backward
from ssscale_kernels.stickbreaking import forward as four_forward
from ssscale_kernels.stickbreaking import stickbreaking_reference
from ssscale_kernels.stickbreaking.benchmark import forward_and_backward, graph_ms, make, starts
from ssscale_kernels.stickbreaking.kept import aux_shapes
from ssscale_kernels.stickbreaking.sixteen import backward as B
from ssscale_kernels.stickbreaking.sixteen import forward as F
from ssscale_kernels.stickbreaking.tune import kernel_ms
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

Shape = tuple[int, int, int, int]  # batch, heads, length, head dim
C = F.Config
SHAPES: list[Shape] = [(4, 24, 4096, 64), (1, 24, 16384, 64), (4, 16, 4096, 128), (8, 32, 2048, 32)]
# Candidates by head dim: forward, dq, dkv. The shape is the first of SHAPES with that head dim.
CANDIDATES: dict[int, tuple[list[C], list[C], list[C]]] = {
    64: (
        [C(64, 64, 4, s, r) for s, r in ((2, 168), (4, 168), (2, 128), (3, 128))]
        + [C(128, 64, 8, 3), C(128, 64, 8, 2)],
        [C(64, 64, 4, s, r) for s, r in ((2, None), (4, None), (3, 168), (2, 168))] + [C(128, 64, 8, 2)],
        [C(64, 64, 4, s, r) for s, r in ((2, None), (3, None), (5, None), (2, 168))],
    ),
    128: (
        [C(128, 64, 8, 2), C(64, 64, 4, 2), C(64, 64, 4, 3)],
        [C(128, 64, 8, 3), C(128, 64, 8, 1), C(64, 64, 4, 2)],
        [C(128, 64, 8, 1), C(64, 64, 4, 2), C(64, 64, 4, 1)],
    ),
    32: (
        [C(64, 64, 4, s, r) for s, r in ((2, 128), (4, 128), (3, 96), (3, 168))],
        [C(64, 64, 4, s, r) for s, r in ((2, None), (4, None), (3, 168), (3, 128))],
        [C(64, 64, 4, s, r) for s, r in ((2, None), (4, None), (3, 168), (2, 168))],
    ),
}
CHUNKS = ((2, 32), (4, 16), (4, 64), (8, 64))
SKIP = 2**-12
LIMIT_S = 450  # no candidate is started later
started = time.time()


def forward_call(shape: Shape, inputs: list[Tensor], module: object = F, **kwargs: object) -> Callable[[], object]:
    """Returns a forward call of the kernels with 16 keys per thread, or of another module with the same interface."""
    batch, _, length, head_dim = shape
    cu, (q, k, v, _) = starts(batch, length), inputs
    forward = module.forward  # type: ignore[attr-defined]
    return partial(forward, q, k, v, cu, cu, None, None, length, head_dim**-0.5, SKIP, max_queries=length, **kwargs)


def backward_call(
    shape: Shape, inputs: list[Tensor], saved: list[Tensor], module: object = B, **kwargs: object
) -> Callable[[], object]:
    """Returns a backward call. saved: what forward returned after log_rest."""
    batch, _, length, head_dim = shape
    cu, (q, k, v, grad) = starts(batch, length), inputs
    backward = module.backward  # type: ignore[attr-defined]
    return partial(backward, grad, None, q, k, v, cu, cu, None, *saved, length, length, head_dim**-0.5, **kwargs)


def both_call(
    shape: Shape, inputs: list[Tensor], forward: object, backward: object, configs: tuple[C, B.BackwardConfig] | None
) -> Callable[[], object]:
    first, second = ({}, {}) if configs is None else ({"config": configs[0]}, {"config": configs[1]})

    def both() -> object:
        saved = forward_call(shape, inputs, forward, **first)()[2:]  # type: ignore[index]
        return backward_call(shape, inputs, saved, backward, **second)()

    return both


def empty_saved(shape: Shape) -> list[Tensor]:
    """Returns results of a forward pass that saw no key, so that backward's kernels compile without running forward."""
    batch, heads, length, _ = shape
    rows, _, stops = aux_shapes(batch * length, heads, batch)
    carry = torch.zeros(rows, device="cuda")
    tiles, stop = (torch.full(s, 1 << 30, dtype=torch.int32, device="cuda") for s in (rows, stops))
    return [carry, tiles, stop, torch.zeros((batch, 4), dtype=torch.int32, device="cuda")]


def pairs(head_dim: int) -> list[B.BackwardConfig]:
    """Returns the current settings of dq and dkv, then candidates that change one of them."""
    now = B.backward_config(head_dim)
    _, dqs, dkvs = CANDIDATES[head_dim]
    found = [now, *(now._replace(dq=dq) for dq in dqs), *(now._replace(dkv=dkv) for dkv in dkvs)]
    return [pair for pair in found if pair.dq.row_block % pair.dkv.row_block == 0]


def tuned_shapes() -> dict[int, Shape]:
    return {head_dim: next(s for s in SHAPES if s[3] == head_dim) for head_dim in CANDIDATES}


CHECKS = [(dtype, dim) for dtype in (torch.bfloat16, torch.float16) for dim in (32, 64, 128)]


def check_inputs(dtype: torch.dtype, head_dim: int, kind: str) -> tuple[list[Tensor], Tensor]:
    """Returns q, k, v, dO of packed sequences of 1, 0, 399 and 700 tokens, 4 heads over 2, and the boundaries."""
    torch.manual_seed(0)
    lengths = [1, 0, 399, 700]
    q, k, v, grad = (torch.randn(sum(lengths), n, head_dim, device="cuda") for n in (4, 2, 2, 4))
    if kind == "huge":
        q[:, 1:] *= 30
    elif kind == "low":
        q, k = 1 + q.abs(), -1 - k.abs()
    elif kind == "edge":  # 16 keys spend 120 bits: less than float32 can express, but more than tile.RANGE
        q, k = torch.ones_like(q), (5.2 + k / 20) / head_dim**0.5
    elif kind == "one-hot":
        q, k = 1 + q.abs(), torch.where(torch.rand_like(k[..., :1]) < 0.1, 8.0, -8.0) * (1 + k.abs())
    cu = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device="cuda")
    return [x.to(dtype) for x in (q, k, v, grad)], cu


def run(inputs: list[Tensor], cu: Tensor, skip: float, entering: Tensor | None) -> list[Tensor]:
    """Returns o, dq, dk, dv and, where log_rest_in is given, its gradient. log_rest then has dO's first column."""
    (q, k, v, grad), longest = inputs, 700
    scale = q.shape[2] ** -0.5
    o, _, carry, tiles, stop, maxima = F.forward(
        q, k, v, cu, cu, None, entering, longest, scale, skip, max_queries=longest
    )
    grad_rest = None if entering is None else grad[..., 0].float()
    results = B.backward(
        grad,
        grad_rest,
        q,
        k,
        v,
        cu,
        cu,
        None,
        carry,
        tiles,
        stop,
        maxima,
        longest,
        longest,
        scale,
        entering=entering is not None,
    )
    return [o, *results[: 3 if entering is None else 4]]


def reference(inputs: list[Tensor], cu: Tensor, entering: Tensor | None, dtype: torch.dtype) -> list[Tensor]:
    """Returns what `run` returns, from plain torch with inputs and results in `dtype`."""
    leaves = [x.to(dtype).requires_grad_() for x in inputs[:3]]
    grad = inputs[3].to(dtype)
    if entering is None:
        o, _ = stickbreaking_reference(*leaves, cu_seqlens_q=cu)
        return [o.detach(), *torch.autograd.grad(o, leaves, grad)]
    rest_in = entering.to(torch.float64 if dtype == torch.float64 else torch.float32).requires_grad_()
    o, rest = stickbreaking_reference(*leaves, cu_seqlens_q=cu, log_rest_in=rest_in)
    grads = torch.autograd.grad([o, rest], [*leaves, rest_in], [grad, grad[..., 0].to(rest.dtype)])
    return [o.detach(), *grads]


def check() -> int:
    """Prints the worst error in units of what is allowed: twice plain torch's. Returns the number of results over it."""
    worst, wrong = 0.0, 0
    cases = [
        (*c, kind, skip, False) for c in CHECKS for kind in ("normal", "huge", "low", "one-hot") for skip in (0, SKIP)
    ]
    cases += [(*c, kind, 0, True) for c in CHECKS for kind in ("normal", "huge", "edge")]
    for dtype, head_dim, kind, skip, carried in cases:
        inputs, cu = check_inputs(dtype, head_dim, kind)
        entering = -8 * torch.rand(inputs[0].shape[:2], device="cuda") if carried else None
        ours = run(inputs, cu, skip, entering)
        plain, exact = (reference(inputs, cu, entering, d) for d in (dtype, torch.float64))
        for name, a, p, e in zip(("o", "dq", "dk", "dv", "d_rest_in"), ours, plain, exact, strict=False):
            error, allowed, size = (x.abs().max().item() for x in (a.double() - e, p.double() - e, e))
            share = error / (2 * allowed + (1e-5 + 2 * skip) * max(size, 1.0))
            # Operands with log_rest_in stay bf16, in which weights and dz are rounded once more.
            limit = 2.0 if carried and dtype == torch.bfloat16 else 1.0
            worst = max(worst, share / limit)
            if not share <= limit:
                wrong += 1
                print(
                    f"WRONG {name}, {dtype}, {head_dim}, {kind}, skip {skip:g}, carried {carried}: {share:.2f}",
                    flush=True,
                )
    print(f"worst error in {len(cases)} cases, in units of what is allowed: {worst:.2f}; over it: {wrong}", flush=True)
    return wrong


def jobs() -> list[Callable[[], object]]:
    """Returns calls that together compile all kernels of a run, the longest first."""
    found: list[Callable[[], object]] = []
    for dtype, head_dim in CHECKS:
        for carried in (False, True):

            def checked(dtype: torch.dtype = dtype, head_dim: int = head_dim, carried: bool = carried) -> object:
                inputs, cu = check_inputs(dtype, head_dim, "normal")
                return run(inputs, cu, 0, inputs[0][..., 0].float() if carried else None)

            found.append(checked)
    for shape in SHAPES:
        first = shape == tuned_shapes()[shape[3]]

        def backwards(shape: Shape, module: object, **kwargs: object) -> object:
            return backward_call(shape, make(*shape, True), empty_saved(shape), module, **kwargs)()

        def forwards(shape: Shape, module: object, **kwargs: object) -> object:
            return forward_call(shape, make(*shape, True), module, **kwargs)()

        found += [
            partial(backwards, shape, B, config=pair) for pair in (pairs(shape[3]) if first else pairs(shape[3])[:1])
        ]
        found.append(partial(backwards, shape, four_backward))
        if first:
            configs = [F.forward_config(shape[3]), *CANDIDATES[shape[3]][0]]
            found += [partial(forwards, shape, F, config=config) for config in configs]
            found.append(partial(forwards, shape, four_forward))
    return found


def compile_side_by_side(workers: int) -> None:
    """Fills Triton's cache from `workers` processes. A candidate that does not compile costs only itself."""
    command = [sys.executable, "-m", __spec__.name, "--warm"]
    running = [subprocess.Popen([*command, f"{i}/{workers}"]) for i in range(workers)]
    for process in running:
        process.wait()
    print(f"compiled after {time.time() - started:.0f} s", flush=True)


def warm(which: str) -> None:
    index, workers = map(int, which.split("/"))
    for job in jobs()[index::workers]:
        try:
            job()
        except Exception as error:  # one candidate must not end the run
            print(f"does not compile or run: {type(error).__name__} {str(error)[:150]}", flush=True)
    torch.cuda.synchronize()


def attempt(what: str, calls: list[Callable[[], object]], split: bool = False) -> float:
    """Prints and returns the time of one candidate, infinite if it fails. split: also prints each backward kernel's."""
    if time.time() - started > LIMIT_S:
        return float("inf")
    try:
        ms = graph_ms(calls, 60)
        print(f"{what}: {ms:.4f} ms{f' ({kernel_ms(calls[0])})' if split else ''}", flush=True)
    except Exception as error:  # a candidate that does not fit must not end the run
        print(f"{what}: {type(error).__name__} {str(error)[:100]}", flush=True)
        return float("inf")
    return ms


def tune(shape: Shape) -> tuple[C, B.BackwardConfig]:
    """Times candidates on dense inputs. Returns the fastest settings that fit together."""
    sets = [make(*shape, spent=False) for _ in range(2)]
    forwards, now = [F.forward_config(shape[3]), *CANDIDATES[shape[3]][0]], B.backward_config(shape[3])
    times = {
        c: attempt(f"{shape} forward {tuple(c)}", [forward_call(shape, s, config=c) for s in sets]) for c in forwards
    }
    forward = min(times, key=times.__getitem__)
    for first, chunk in CHUNKS if shape == SHAPES[0] else ():
        calls = [forward_call(shape, s, first_chunk=first, chunk=chunk) for s in sets]
        attempt(f"{shape} forward in chunks of {first}, at most {chunk}", calls)
    saved = [forward_call(shape, s)()[2:] for s in sets]  # type: ignore[index]
    both = {}
    for pair in pairs(shape[3]):
        if pair.dq.row_block <= forwards[0].row_block:
            calls = [backward_call(shape, s, kept, config=pair) for s, kept in zip(sets, saved, strict=True)]
            both[pair] = attempt(f"{shape} dq {tuple(pair.dq)} dkv {tuple(pair.dkv)}", calls, split=True)
    dq = min((p for p in both if p.dkv == now.dkv), key=both.__getitem__).dq
    dkv = min((p for p in both if p.dq == now.dq), key=both.__getitem__).dkv
    pair = B.BackwardConfig(dq, dkv)
    fits = forward.row_block >= dq.row_block and dq.row_block % dkv.row_block == 0
    return (forward, pair) if fits else (forwards[0], now)


def print_row(shape: Shape, spent: bool, tuned: tuple[C, B.BackwardConfig]) -> None:
    """Prints forward and forward + backward of every implementation."""
    batch, _, length, _ = shape
    sets = [make(*shape, spent) for _ in range(3)]
    cells = []
    for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION):
        try:
            inputs = [[x.unflatten(0, (batch, length)).transpose(1, 2) for x in s] for s in sets]
            with sdpa_kernel(backend):
                forward, backward = forward_and_backward(
                    lambda q, k, v: scaled_dot_product_attention(q, k, v, is_causal=True), inputs, 100
                )
            cells.append((forward, forward + backward))
        except Exception as error:  # a backend that this machine lacks is a gap in the table
            print(f"{backend}: {str(error)[:100]}")
            cells.append((float("nan"), float("nan")))
    for modules, configs in (((four_forward, four_backward), None), ((F, B), None), ((F, B), tuned)):
        try:
            first = {} if configs is None else {"config": configs[0]}
            forward = graph_ms([forward_call(shape, s, modules[0], **first) for s in sets], 100)
            cells.append((forward, graph_ms([both_call(shape, s, *modules, configs) for s in sets], 100)))
        except Exception as error:  # the other column is still worth its time
            print(f"{modules[0].__name__}: {str(error)[:100]}")
            cells.append((float("nan"), float("nan")))
    times = " | ".join(f"{a:.3f} / {b:.3f}" for a, b in cells)
    shares = f"{cells[4][0] / cells[0][0]:.2f} / {cells[4][1] / cells[0][1]:.2f}"
    print(f"| {'×'.join(map(str, shape))} | {'spent' if spent else 'dense'} | {times} | {shares} |", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--warm", help="I/N: only compile every N-th kernel from the I-th on")
    parser.add_argument("--workers", type=int, default=min(16, os.cpu_count() or 1), help="processes that compile")
    arguments = parser.parse_args()
    if arguments.warm:
        warm(arguments.warm)
        return 0
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, Triton {triton.__version__}", flush=True)
    compile_side_by_side(arguments.workers)
    wrong = check()
    print(f"checked after {time.time() - started:.0f} s", flush=True)
    best = {head_dim: tune(shape) for head_dim, shape in tuned_shapes().items()}
    print(f"tuned after {time.time() - started:.0f} s: {best}\n\nms, forward / forward + backward", flush=True)
    print("| shape | sticks | FA2 | cuDNN | four keys | 16 keys | 16 keys, tuned | tuned ÷ FA2 |")
    print("|" + 8 * "---|", flush=True)
    for shape, spent in itertools.product(SHAPES, (False, True)):
        print_row(shape, spent, best[shape[3]])
    print(f"done after {time.time() - started:.0f} s", flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
