"""python -m ssscale_kernels.stickbreaking.benchmark: checks the kernels, then times them next to PyTorch's attention.

Needs a CUDA GPU.
"""

import argparse
import itertools
import statistics
import sys
from collections.abc import Callable
from datetime import date
from functools import partial
from typing import Any

import torch
import triton
from ssscale_kernels.gpu import require_gpu
from ssscale_kernels.stickbreaking import accuracy, stickbreaking_attention
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

# (batch, query heads, length, head dim): the shapes of 1b, 3b and 350m, a long one and one with wide heads.
SHAPES = [(4, 24, 4096, 64), (4, 36, 4096, 64), (8, 32, 2048, 32), (1, 24, 16384, 64), (4, 16, 4096, 128)]
SETS = 3


def starts(batch: int, length: int) -> Tensor:
    return torch.arange(0, (batch + 1) * length, length, dtype=torch.int32, device="cuda")


def make(batch: int, num_heads: int, length: int, head_dim: int, spent: bool) -> list[Tensor]:
    """Returns q, k, v, dO [T, N, H]: unit normal if `spent`, otherwise logits so low that no stick is spent."""
    q, k, v, grad = (torch.randn(batch * length, num_heads, head_dim, device="cuda") for _ in range(4))
    if not spent:
        q, k = 1 + q.abs() / 2, -1.5 * (64 / head_dim) ** 0.5 * (1 + k.abs() / 2)
    return [x.bfloat16() for x in (q, k, v, grad)]


def graph_ms(calls: list[Callable[[], object]], budget_ms: float = 150) -> float:
    """Returns the median GPU time per call in ms, from replays of one CUDA graph, without Python's launches.

    Each call has its own inputs, so that it does not find those of the previous call in the cache.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            for call in calls:
                call()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            kept = [call() for call in calls]
        times: list[float] = []
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        while len(times) < 5 or (sum(times) < budget_ms and len(times) < 200):
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end))
    torch.cuda.synchronize()
    del kept
    return statistics.median(times) / len(calls)


def forward_and_backward(
    function: Callable[..., Tensor], inputs: list[list[Tensor]], budget_ms: float = 150
) -> tuple[float, float]:
    """Returns the median ms of forward, and of backward as the difference to both. inputs: sets of q, k, v, dO."""

    def both(q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> object:
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        return torch.autograd.grad(function(*leaves), leaves, grad)

    with torch.no_grad():
        forward = graph_ms([partial(function, *s[:3]) for s in inputs], budget_ms)
    return forward, graph_ms([partial(both, *s) for s in inputs], budget_ms) - forward


def check(float32: bool = True) -> dict[str, Any]:
    """Returns and prints the worst share of what is allowed (`accuracy.share`) by dtype and result, and what is over it."""
    worst: dict[str, float] = {}
    over: list[str] = []
    for case in accuracy.cases():
        if case.dtype == torch.float32 and not float32:
            continue
        errors = accuracy.compare(accuracy.draw(case, "cuda"))
        for name, error in errors.items():
            share, column = accuracy.share(error), f"{str(case.dtype)[6:]} {name}"
            worst[column] = max(worst.get(column, 0.0), share)
            if not share <= 1:
                over.append(f"{name} is {share:.2f} of what is allowed: {case}")
                print(over[-1], flush=True)
    shares = ", ".join(f"{column} {x:.2f}" for column, x in worst.items())
    print(f"worst share of the allowed error: {shares}; over it: {len(over)}", flush=True)
    return {"worst": worst, "over": over}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--decode", action="store_true", help="also time decoding")
    parser.add_argument("--reference", help="folder of the authors' kernels, patched as README.md says: timed last")
    arguments = parser.parse_args()
    require_gpu()
    versions = f"torch {torch.__version__}, Triton {triton.__version__}"
    print(f"{date.today()}, {torch.cuda.get_device_name()}, {versions}; ms, forward / backward")
    check()
    print("| shape | FA2 | cuDNN | ours, dense | ours, spent | dense against FA2 | TFLOP/s, dense |")
    print("|---|---|---|---|---|---|---|")
    for shape in SHAPES:
        _print_row(shape)
    memory()
    if arguments.decode:
        decode()
    if arguments.reference:
        sys.path.insert(0, arguments.reference)
        for shape in SHAPES:
            times = authors(shape)
            print(f"authors' kernel, {'×'.join(map(str, shape))}: {times[0]:.2f} / {times[1]:.2f}", flush=True)


def _print_row(shape: tuple[int, int, int, int]) -> None:
    batch, num_heads, length, head_dim = shape
    cu = starts(batch, length)

    def ours(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return stickbreaking_attention(q, k, v, cu_seqlens_q=cu, max_seqlen_q=length, max_seqlen_k=length)[0]

    def sdpa(backend: SDPBackend) -> tuple[float, float]:
        inputs = [[x.unflatten(0, (batch, length)).transpose(1, 2) for x in make(*shape, True)] for _ in range(SETS)]
        with sdpa_kernel(backend):
            return forward_and_backward(lambda q, k, v: scaled_dot_product_attention(q, k, v, is_causal=True), inputs)

    times = [sdpa(SDPBackend.FLASH_ATTENTION), sdpa(SDPBackend.CUDNN_ATTENTION)]
    times += [forward_and_backward(ours, [make(*shape, spent) for _ in range(SETS)]) for spent in (False, True)]
    # Useful operations as for softmax: two products forward and five backward, over the causal half.
    tflops = 3.5 * 2 * batch * num_heads * length**2 * head_dim / sum(times[2]) / 1e9
    cells = " | ".join(f"{a:.2f} / {b:.2f}" for a, b in times)
    against = sum(times[2]) / sum(times[0])
    print(f"| {'×'.join(map(str, shape))} | {cells} | {against:.2f} | {tflops:.0f} |", flush=True)


def authors(shape: tuple[int, int, int, int]) -> tuple[float, float]:
    """Times the authors' kernel (commit in README.md), which has heads first, locks dK and dV, and skips nothing."""
    from stickbreaking_attention import sb_attn_varlen

    batch, _, length, head_dim = shape
    cu = starts(batch, length)[1:]
    inputs = [[x.transpose(0, 1).contiguous() for x in make(*shape, False)] for _ in range(SETS)]
    apply = partial(sb_attn_varlen, cu_seqlens=cu, max_seqlens=length, inv_temp=head_dim**-0.5, zero_start=False)
    return forward_and_backward(lambda q, k, v: apply(q, k, v)[0], inputs)


def memory() -> None:
    """Prints the peak memory of forward + backward above the inputs: o, log_rest, gradients and scratch."""
    for length in (16384, 65536):
        q, k, v, grad = make(1, 8, length, 64, spent=False)
        leaves = [x.requires_grad_() for x in (q, k, v)]
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        torch.autograd.grad(stickbreaking_attention(*leaves)[0], leaves, grad)
        torch.cuda.synchronize()
        extra = torch.cuda.max_memory_allocated() - before
        share = f"{extra / 2**20:.0f} MiB, {extra / length / 8:.0f} bytes a token and head"
        print(f"peak extra memory at {length} tokens, 8 heads of 64: {share}")


def decode() -> None:
    """Times one token per sequence, with 24 heads over 8 key heads of 64, against SDPA with the same grouping."""
    print("| decode: cache, batch | ours, dense µs | ours, spent µs | SDPA µs |\n|---|---|---|---|")
    for length, batch in itertools.product((1024, 4096, 16384, 65536, 131072), (1, 32)):
        cells = []
        cu_q, cu_k = starts(batch, 1), starts(batch, length)
        offsets = torch.full((batch,), length, dtype=torch.int32, device="cuda")
        layout = {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k, "q_offsets": offsets}
        for spent in (False, True):
            q, _, _, _ = make(batch, 24, 1, 64, spent)
            _, k, v, _ = make(batch, 8, length, 64, spent)
            ours = partial(stickbreaking_attention, q, k, v, max_seqlen_q=1, max_seqlen_k=length, **layout)
            with torch.no_grad():
                cells.append(graph_ms([ours] * 8, 40))
        q4, k4, v4 = (x.unflatten(0, (batch, -1)).transpose(1, 2) for x in (q, k, v))
        cells.append(graph_ms([partial(scaled_dot_product_attention, q4, k4, v4, enable_gqa=True)] * 8, 40))
        print(f"| {length}, {batch} | " + " | ".join(f"{1e3 * x:.0f}" for x in cells) + " |", flush=True)


if __name__ == "__main__":
    main()
