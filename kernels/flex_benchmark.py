"""Times position biases and sliding windows, and plain softmax attention for comparison, on one GPU:

python -m ssscale_kernels.flex_benchmark [batch] [heads] [length] [head_dim]

Prints ms of forward and of forward + backward in bf16, with one and with four documents per row. FIRE's inference
computes its MLP inside FlexAttention. Its training computes a table of the bias, which FlexAttention reads in forward and
adds gradients to in backward; the times include the table. Compilation takes about two minutes.
"""

import argparse
import statistics
from collections.abc import Callable
from functools import partial

import torch
from ssscale_kernels.flex import ScoreMod, biased_attention, document_mask, linear_bias, mlp_bias, table_bias
from ssscale_kernels.gpu import require_gpu
from ssscale_kernels.softmax import softmax_attention
from torch import Tensor

SHAPE = {"batch": 4, "heads": 24, "length": 4096, "head_dim": 64}
WINDOWS = (512, 1024, 2048)


def milliseconds(run: Callable[[], object], repeats: int = 20) -> float:
    """The median of `repeats` calls after three that warm up."""
    times = []
    for number in range(repeats + 3):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        end.synchronize()
        if number >= 3:
            times.append(start.elapsed_time(end))
    return statistics.median(times)


def fire_table(weights: list[Tensor], length: int) -> Tensor:
    """FIRE's bias (arXiv:2310.04418) for every pair of positions, [N, L, L] float32."""
    c, w1, b1, w2, b2 = weights
    i = torch.arange(length, device=c.device)
    x = ((c * (i[:, None] - i)).abs() + 1).log() / (c * i[:, None].clamp(min=512) + 1).log()
    return ((x[..., None] * w1 + b1).relu() @ w2.T + b2).movedim(-1, 0)


def cases(inputs: list[Tensor], length: int, each: int) -> dict[str, tuple[Callable[[], Tensor], bool]]:
    """name → (a call that returns the output, whether it has a backward pass), for documents of `each` tokens."""
    q, k, v = inputs
    tokens, heads, _ = q.shape
    cu_seqlens = torch.arange(0, tokens + 1, each, device=q.device, dtype=torch.int32)
    positions = (torch.arange(tokens, device=q.device) % each).to(torch.int32)
    masks = {window: document_mask(positions, window) for window in (None, *WINDOWS)}
    slopes = torch.exp2(-8 / heads * torch.arange(1, heads + 1, device=q.device))
    shapes = [(1,), (32,), (32,), (heads, 32), (heads,)]
    weights = [torch.rand(shape, device=q.device).requires_grad_() for shape in shapes]
    c, w1, b1, w2, b2 = (x.detach() for x in weights)
    reach = ((c * torch.arange(len(q), device=q.device)) + 1).log()
    norm = (c * positions.clamp(min=512) + 1).log()

    def softmax(window: int | None = None) -> Callable[[], Tensor]:
        return lambda: softmax_attention(
            q, k, v, cu_seqlens=cu_seqlens, max_seqlen=length, uniform_length=each, window=window
        )

    def flex(score_mod: Callable[[], ScoreMod], window: int | None = None, loads: bool = False) -> Callable[[], Tensor]:
        return lambda: biased_attention(q, k, v, score_mod=score_mod(), block_mask=masks[window], loads=loads)

    found = {"softmax": (softmax(), True)}
    found |= {f"softmax, window {window}": (softmax(window), True) for window in WINDOWS}
    found["FlexAttention, no bias"] = (flex(lambda: lambda score, b, h, i, j: score), True)
    found["ALiBi"] = (flex(lambda: linear_bias(slopes)), True)
    found["ALiBi, window 512"] = (flex(lambda: linear_bias(slopes), 512), True)
    found["FIRE, inference"] = (flex(lambda: mlp_bias(reach, norm, w1, b1, w2, b2), loads=True), False)
    found["FIRE, training"] = (flex(lambda: table_bias(fire_table(weights, length), positions), loads=True), True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, size in SHAPE.items():
        parser.add_argument(name, type=int, nargs="?", default=size, help=f"{size} unless given")
    shape = parser.parse_args()
    require_gpu()
    measure(shape.batch, shape.heads, shape.length, shape.head_dim)


def measure(batch: int, heads: int, length: int, head_dim: int) -> None:
    # Every case is a graph of its own. Beyond the limit it would run uncompiled.
    torch._dynamo.config.recompile_limit = 64
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {batch} × {heads} × {length} × {head_dim}, bf16")
    print("| documents per row | case | forward ms | forward + backward ms |\n|---|---|---|---|")
    tokens = batch * length
    q, k, v = (torch.randn(tokens, heads, head_dim, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    upstream = torch.randn_like(q)
    inputs = [x.requires_grad_() for x in (q, k, v)]
    for documents in (1, 4):
        each = length // documents
        positions = (torch.arange(tokens, device="cuda") % each).to(torch.int32)
        build = milliseconds(partial(document_mask, positions), 5)
        for name, (run, trains) in cases(inputs, length, each).items():

            def train(run: Callable[[], Tensor] = run) -> None:
                torch.autograd.grad(run(), inputs, upstream)

            with torch.no_grad():
                forward = milliseconds(run)
            both = f"{milliseconds(train):.2f}" if trains else "-"
            print(f"| {documents} | {name} | {forward:.2f} | {both} |", flush=True)
        print(f"| {documents} | block mask, once per batch | {build:.2f} | - |", flush=True)


if __name__ == "__main__":
    main()
