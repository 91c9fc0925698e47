# ruff: noqa: B023 (every closure is called within its own turn of the loop)
"""Checks, then times, attention with rotary positions and Scalable-Softmax on one CUDA GPU:

python -m ssscale_kernels.ssmax.benchmark [--flex]

README.md has the results. Times are in ms, forward / backward, except for those of the rotation kernels, in µs.
"""

import argparse
import itertools
import random
import statistics
from collections.abc import Callable
from datetime import date
from functools import partial
from typing import Any

import torch
import triton
from ssscale_kernels.buckets import bucket
from ssscale_kernels.gpu import require_gpu
from ssscale_kernels.softmax import backends, choose_backend, softmax_attention
from ssscale_kernels.softmax.documents import Documents
from ssscale_kernels.ssmax import query_factor, rotary, rotary_attention, rotary_attention_reference, rotate
from ssscale_kernels.stickbreaking.benchmark import forward_and_backward, graph_ms
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import scaled_dot_product_attention

ROWS, LENGTH, HEADS, HEAD_DIM = 4, 4096, 24, 64  # the 1b shape
SETS = 3  # of inputs, used in turn
DEVICE = torch.device("cuda", 0)


def boundaries(lengths: list[int], size: int | None = None) -> Tensor:
    """cu_seqlens of the documents, filled up to `size` entries with empty ones."""
    values = [0, *itertools.accumulate(lengths)]
    values += values[-1:] * ((size or len(values)) - len(values))
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def inputs(
    lengths: list[int], num_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype
) -> dict[str, Tensor]:
    """The tensors that `rotary_attention` takes, and the gradient of its result."""
    total = sum(lengths)
    positions = torch.cat([torch.arange(length) for length in lengths]).to(DEVICE)
    angle = positions[:, None] * 10000 ** -(torch.arange(0, head_dim, 2, device=DEVICE) / head_dim)
    return {
        "qkv": torch.randn(total, num_heads + 2 * num_kv_heads, head_dim, device=DEVICE).to(dtype),
        "cos": angle.cos(),
        "sin": angle.sin(),
        "log_n": (positions + 1).float().log(),
        "s": 0.3 + 0.1 * torch.randn(num_heads, device=DEVICE),
        "b": 0.1 * torch.randn(num_heads, device=DEVICE),
        "grad": torch.randn(total, num_heads, head_dim, device=DEVICE).to(dtype),
    }


# lengths of the documents, query heads, key heads, head dim, dtype, window, deterministic
Case = tuple[list[int], int, int, int, torch.dtype, int | None, bool]


def cases() -> list[Case]:
    """Every backend, with several dtypes, head dims, ratios of heads and windows, on ragged and equal documents."""
    ragged, even = [1, 0, 399, 700, 2, 513], [640] * 3
    bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32
    found: list[Case] = [
        (lengths, 4, 4, head_dim, dtype, None, False)
        for lengths in (ragged, even)
        for head_dim in (32, 64, 128)
        for dtype in (bf16, fp16)
    ]
    found += [(ragged, 4, 4, head_dim, bf16, None, False) for head_dim in (16, 40, 96)]
    found += [(lengths, 6, 2, 64, bf16, None, False) for lengths in (ragged, even, [300])]
    found += [(lengths, 4, 1, 64, bf16, window, False) for lengths in (ragged, even) for window in (1, 100, 512)]
    found += [(lengths, 6, 2, 64, bf16, window, True) for lengths in (ragged, even) for window in (None, 100)]
    found += [
        (ragged, 4, 2, 64, fp32, None, False),
        (even, 4, 2, 20, bf16, 100, False),
        ([70, 1, 9], 4, 2, 64, bf16, None, False),
    ]
    return found


def check() -> bool:
    """Whether values and gradients of all cases stay within budget; prints the worst share of it for each backend."""
    worst: dict[str, float] = {}
    good = [check_case(case, worst) for case in cases()]
    print("worst error, in units of what is allowed:")
    print("  " + ", ".join(f"{name} {share:.2f}" for name, share in worst.items()), flush=True)
    return all(good)


def check_case(case: Case, worst: dict[str, float]) -> bool:
    """Compares one case with float64, and notes the shares of the budget that its errors take in `worst`.

    The budget is twice the larger one of two errors: of float32 torch, and of the same attention kernel after
    rotations by torch, because attention kernels round the weights to 16 bits.
    """
    lengths, num_heads, num_kv_heads, head_dim, dtype, window, deterministic = case
    torch.manual_seed(0)
    tensors = inputs(lengths, num_heads, num_kv_heads, head_dim, dtype)
    cu, grad = boundaries(lengths), tensors.pop("grad")

    def run(function: Callable[..., Tensor], wide: torch.dtype, **kwargs: Any) -> list[Tensor]:
        x = tensors["qkv"].to(dtype if wide == torch.float32 else wide).requires_grad_()
        others = {name: value.to(wide) for name, value in tensors.items() if name != "qkv"}
        leaves = [x, *(others[name].requires_grad_() for name in ("log_n", "s", "b"))]
        o = function(x, num_heads, cu_seqlens=cu, window=window, **others, **kwargs)
        return [o.detach(), *torch.autograd.grad(o, leaves, grad.to(o.dtype))]

    uniform = lengths[0] if len(set(lengths)) == 1 else None
    options = {"max_seqlen": max(lengths), "uniform_length": uniform, "deterministic": deterministic}
    backend = choose_backend(DEVICE, dtype, head_dim, max(lengths), window, deterministic)
    ours, again = (run(rotary_attention, torch.float32, **options) for _ in range(2))
    plain, unfused = run(rotary_attention_reference, torch.float32), run(unfused_attention, torch.float32, **options)
    exact = run(rotary_attention_reference, torch.float64)
    good = True
    if deterministic and not all(torch.equal(a, b) for a, b in zip(ours, again)):
        print(f"not the same bits twice: {backend}, {lengths}, {dtype}", flush=True)
        good = False
    for name, a, p, q, e in zip(("o", "dqkv", "dlog_n", "ds", "db"), ours, plain, unfused, exact):
        error, *others, size = (x.abs().max().item() for x in (a.double() - e, p.double() - e, q.double() - e, e))
        share = error / (2 * max(others) + 1e-5 * max(size, 1.0))
        key = f"{backend} {str(dtype).removeprefix('torch.')} {name}"
        worst[key] = max(worst.get(key, 0.0), share)
        if not share <= 1:
            good = False
            shown = f"{lengths}, {num_heads} over {num_kv_heads} heads of {head_dim}, window {window}, {dtype}"
            print(f"over budget on {backend}: {name} of {shown}: {error:.2e}, {share:.2f} of it", flush=True)
    return check_lse(tensors["qkv"].detach(), num_heads, cu, options | {"window": window}) and good


def unfused_attention(
    qkv: Tensor,
    num_heads: int,
    *,
    cos: Tensor,
    sin: Tensor,
    log_n: Tensor,
    s: Tensor,
    b: Tensor,
    **options: Any,
) -> Tensor:
    """The same attention kernel after rotations by torch, which autograd differentiates."""
    num_kv_heads = (qkv.shape[1] - num_heads) // 2
    q, k, v = qkv.split((num_heads, num_kv_heads, num_kv_heads), 1)
    q, k = rotate(q, cos, sin, query_factor(log_n, s, b)), rotate(k, cos, sin)
    return softmax_attention(q, k, v, **options)


def check_lse(qkv: Tensor, num_heads: int, cu: Tensor, options: dict[str, Any]) -> bool:
    """Compares lse with that of plain torch in float32."""
    num_kv_heads = (qkv.shape[1] - num_heads) // 2
    q, k, v = (x.contiguous() for x in qkv.split((num_heads, num_kv_heads, num_kv_heads), 1))
    _, lse = softmax_attention(q, k, v, cu_seqlens=cu, return_lse=True, **options)
    documents = Documents(cu, options["max_seqlen"], None, qkv.shape[2] ** -0.5, options["window"], False)
    _, exact = backends.forward(q.float(), k.float(), v.float(), documents)
    error = (lse - exact).abs().max().item()
    if not error < 2e-3:
        print(f"lse is off by {error:.2e}: {tuple(qkv.shape)}, {options}", flush=True)
    return error < 2e-3


def packings() -> dict[str, list[int]]:
    """Lengths of the documents of four rows: 1, 4 and 16 per row, of one length and cut at random places."""
    generator = random.Random(0)
    found = {"1": [LENGTH] * ROWS}
    for count in (4, 16):
        found[f"{count} equal"] = [LENGTH // count] * (ROWS * count)
        lengths = []
        for _ in range(ROWS):
            cuts = [0, *sorted(generator.sample(range(16, LENGTH, 16), count - 1)), LENGTH]
            lengths += [b - a for a, b in itertools.pairwise(cuts)]
        found[str(count)] = lengths
    return found


def teraflops(lengths: list[int], milliseconds: float) -> float:
    """Useful operations of forward and backward, 3.5 · 2 · N · H · Σ length² (the causal half), per second."""
    return 3.5 * 2 * HEADS * HEAD_DIM * sum(length**2 for length in lengths) / milliseconds / 1e9


Step = Callable[[dict[str, Tensor]], tuple[Tensor, list[Tensor]]]


def times(step: Step, sets: list[dict[str, Tensor]]) -> tuple[float, float]:
    """Median ms of forward and of backward; `step` returns the result and the leaves to differentiate."""

    def forward(tensors: dict[str, Tensor]) -> object:
        return step(tensors)[0]

    def both(tensors: dict[str, Tensor]) -> object:
        o, leaves = step({name: value.detach().requires_grad_() for name, value in tensors.items()})
        return torch.autograd.grad(o, leaves, tensors["grad"])

    with torch.no_grad():
        first = graph_ms([partial(forward, tensors) for tensors in sets])
    return first, graph_ms([partial(both, tensors) for tensors in sets]) - first


def attention_step(lengths: list[int], factor: bool, window: int | None = None) -> Step:
    """Only one document per row takes the dense plan: several equal ones show what ragged offsets cost."""
    uniform = LENGTH if lengths[0] == LENGTH else None
    cu = boundaries(lengths, bucket(len(lengths) + 1))

    def step(tensors: dict[str, Tensor]) -> tuple[Tensor, list[Tensor]]:
        given = {"log_n": tensors["log_n"].detach(), "s": tensors["s"]} if factor else {}
        o = rotary_attention(
            tensors["qkv"],
            HEADS,
            cu_seqlens=cu,
            max_seqlen=LENGTH,
            uniform_length=uniform,
            cos=tensors["cos"].detach(),
            sin=tensors["sin"].detach(),
            window=window,
            **given,
        )
        return o, [tensors["qkv"], *([tensors["s"]] if factor else [])]

    return step


def measure(flex: bool) -> None:
    """Prints the table of README.md, and under each row with ragged documents, or one per row, the times of windows."""
    columns = "softmax + RoPE | SSMax + RoPE | SSMax / softmax | attention alone | FA2 varlen | dense cuDNN | dense FA2"
    print(f"| documents per row | {columns} | TFLOP/s: attention, varlen, dense cuDNN, dense FA2 |\n|---|" + "---|" * 8)
    for name, lengths in packings().items():
        torch.manual_seed(0)
        sets = [inputs(lengths, HEADS, HEADS, HEAD_DIM, torch.bfloat16) for _ in range(SETS)]
        # In turns, and the median of each, because clocks drift by more than the difference.
        rounds = [[times(attention_step(lengths, factor), sets) for factor in (False, True)] for _ in range(5)]
        cells = [tuple(statistics.median(turn[i][j] for turn in rounds) for j in range(2)) for i in range(2)]
        ratio = statistics.median(sum(turn[1]) / sum(turn[0]) for turn in rounds)
        q, k, v = ([x["qkv"][:, i * HEADS : (i + 1) * HEADS].contiguous() for x in sets] for i in range(3))
        tensors = [list(own) for own in zip(q, k, v, (x["grad"] for x in sets))]
        alone = measure_kernels(lengths, tensors)
        shown = [f"{a:.3f} / {b:.3f}" for a, b in (*cells, *alone)] + [""] * (4 - len(alone))
        rates = ", ".join(f"{teraflops(lengths, sum(t)):.0f}" for t in alone)
        print(f"| {name} | {shown[0]} | {shown[1]} | {ratio:.4f} | {' | '.join(shown[2:])} | {rates} |", flush=True)
        if "equal" in name:
            continue
        for window in (512, 1024, 2048):
            windowed = times(attention_step(lengths, False, window), sets)
            print(f"#   {name}, window {window}: softmax + RoPE {windowed[0]:.3f} / {windowed[1]:.3f}", flush=True)
        if flex:
            measure_flex(name, lengths, tensors)


def measure_kernels(lengths: list[int], tensors: list[list[Tensor]]) -> list[tuple[float, float]]:
    """Times of our attention, FlashAttention-2 and, for documents of one length, dense cuDNN and FlashAttention-2.

    tensors: sets of q, k, v and the gradient of o, [T, N, H] each.
    """
    cu, exact_cu = boundaries(lengths, bucket(len(lengths) + 1)), boundaries(lengths)
    longest, uniform = max(lengths), LENGTH if lengths[0] == LENGTH else None
    found = [
        forward_and_backward(
            lambda q, k, v: softmax_attention(q, k, v, cu_seqlens=cu, max_seqlen=LENGTH, uniform_length=uniform),
            tensors,
        ),
        forward_and_backward(
            lambda q, k, v: varlen_attn(q, k, v, exact_cu, exact_cu, longest, longest, window_size=(-1, 0)),
            tensors,
        ),
    ]
    if len(set(lengths)) == 1:
        # [B, N, length, H]
        dense = [[x.unflatten(0, (-1, longest)).transpose(1, 2) for x in own] for own in tensors]
        for backend in (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION):
            with sdpa_kernel(backend):
                found.append(forward_and_backward(partial(scaled_dot_product_attention, is_causal=True), dense))
    return found


def measure_flex(name: str, lengths: list[int], tensors: list[list[Tensor]]) -> None:
    """FlexAttention with ALiBi, without and with a window, on the same documents."""
    from ssscale_kernels.flex import biased_attention, document_mask, linear_bias

    positions = torch.cat([torch.arange(length) for length in lengths]).to(DEVICE)
    slopes = torch.exp2(-8 / HEADS * torch.arange(1, HEADS + 1, device=DEVICE))
    for label, window in (("ALiBi", None), ("ALiBi, window 512", 512)):
        mask = document_mask(positions, window)
        run = partial(biased_attention, score_mod=linear_bias(slopes), block_mask=mask)
        a, b = forward_and_backward(lambda q, k, v: run(q, k, v), tensors)
        print(f"#   {name}, FlexAttention, {label}: {a:.3f} / {b:.3f}", flush=True)


def measure_rotation() -> None:
    """The rotation kernels alone, for several tilings, and the share of the bandwidth of a copy that they reach."""
    lengths = [LENGTH] * ROWS
    sets = [inputs(lengths, HEADS, HEADS, HEAD_DIM, torch.bfloat16) for _ in range(SETS)]
    source = torch.empty(1 << 29, dtype=torch.uint8, device=DEVICE)
    copies = graph_ms([partial(source[: 1 << 28].copy_, source[1 << 28 :])])
    bandwidth = 2**29 / copies / 1e9
    unit = ROWS * LENGTH * HEADS * HEAD_DIM * 2 / bandwidth / 1e9  # ms to read or write one of q, k, v
    print(f"a copy moves {bandwidth:.2f} TB/s; reading or writing one of q, k, v: {unit * 1e3:.1f} µs")
    for pairs, warps in ((64, 4), (64, 8), (128, 4), (128, 8)):
        tuned = rotary.Tiling(pairs, warps)
        cells = []
        for factor in (False, True):
            outs = []
            for x in sets:
                log_n, s = (x["log_n"], x["s"]) if factor else (None, None)
                grads = [torch.randn_like(x["qkv"][:, :HEADS]).contiguous() for _ in range(2)]
                outs.append((x, log_n, s, grads[0], grads[1], torch.empty_like(x["qkv"])))
            forward = graph_ms(
                [
                    partial(rotary.forward, x["qkv"], HEADS, x["cos"], x["sin"], log_n, s, None, tuned)
                    for x, log_n, s, *_ in outs
                ]
            )
            backward = graph_ms(
                [
                    partial(
                        rotary.backward,
                        dq,
                        dk,
                        x["qkv"],
                        into,
                        x["cos"],
                        x["sin"],
                        log_n,
                        s,
                        None,
                        factor,
                        False,
                        tuned,
                    )
                    for x, log_n, s, dq, dk, into in outs
                ]
            )
            shares = f"{4 * unit / forward:.2f}, {(5 if factor else 4) * unit / backward:.2f} of the bandwidth"
            cells.append(f"{forward * 1e3:.1f} / {backward * 1e3:.1f} µs ({shares})")
        print(f"# {pairs} pairs, {warps} warps: RoPE {cells[0]}; with SSMax {cells[1]}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--flex", action="store_true", help="also time FlexAttention with ALiBi")
    arguments = parser.parse_args()
    require_gpu()
    versions = f"torch {torch.__version__}, Triton {triton.__version__}, cuDNN {torch.backends.cudnn.version()}"
    print(f"{date.today()}, {torch.cuda.get_device_name()}, {versions}; ms, forward / backward")
    print("checks passed" if check() else "CHECKS FAILED", flush=True)
    measure_rotation()
    measure(arguments.flex)


if __name__ == "__main__":
    main()
