"""Stick-breaking attention on activations of a trained model (eval.benchmarks.stickbreaking_trained)."""

import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import MethodType
from typing import Any, NamedTuple

import torch
from ssscale_kernels.stickbreaking import stickbreaking_attention, stickbreaking_reference
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention, softplus

from eval.benchmarks.stickbreaking_range import BITS, blocks_beyond
from ssscale.data.stream import PackedData
from ssscale.layout import IGNORE, PackedLayout
from ssscale.model.decoder import Attention, Decoder
from ssscale.model.generate import generate

THRESHOLD = 2**-12
ROWS, KEYS = 128, 64  # the tile in which liveness is counted
PROMPT, NEW_TOKENS = 500, 200
LONGEST_CHECKED = 4096  # the float64 reference holds length² numbers
FAINT = (2**-18, 2**-14, 2**-10)  # bounds on the stick that a row spends in a tile
BASELINES = {"FA2": SDPBackend.FLASH_ATTENTION, "cuDNN": SDPBackend.CUDNN_ATTENTION}
Times = tuple[float, float]
Kernel = Callable[..., tuple[Tensor, Any]]


def held_out(data: PackedData, length: int, rows: int) -> Tensor:
    """Return at most `rows` sequences of `length` tokens, [rows · length] int64, joined from rows across the split.

    Exits with a message if length is not a multiple of the rows' length, or if there are too few rows.
    """
    joined = length // data.length
    if joined * data.length != length:
        raise SystemExit(f"a length must be a multiple of the row length, {data.length} tokens, got {length}")
    every = [(source, i) for source, count in data.sources.items() for i in range(count)]
    rows = min(rows, len(every) // joined)
    if rows == 0:
        raise SystemExit(f"{len(every)} validation rows of {data.length} do not make one sequence of {length}")
    step = len(every) // (rows * joined)
    chosen = [data.row(*every[i * step]) for i in range(rows * joined)]
    return torch.cat([torch.from_numpy(row.tokens.astype("int64")) for row in chosen])


def layers_of(model: Decoder) -> list[Attention]:
    """Return the attention layers. Exits with a message unless all are stick-breaking layers."""
    if list(model.mixers) != ["stickbreaking"]:
        raise SystemExit("the run's model must have only stick-breaking mixers")
    return [block.attention for block in model.blocks]


def capture(model: Decoder, tokens: Tensor, labels: Tensor, layout: PackedLayout) -> list[list[Tensor]]:
    """Return [q, k, v, dO] of every layer. dO is the gradient of the mean loss."""
    layers: list[list[Tensor]] = []

    def recording(layer: Attention, *inputs: Any) -> Tensor:
        o = Attention.attend(layer, *inputs)
        found = [x.detach().contiguous() for x in inputs[:3]]
        layers.append(found)
        o.register_hook(lambda grad: found.append(grad.contiguous()))
        return o

    for layer in layers_of(model):
        layer.__dict__["attend"] = MethodType(recording, layer)  # hides the method of the class until it is deleted
    model.embedding.weight.requires_grad_(True)
    try:
        model(tokens, layout, labels).mean().backward()
    finally:
        for layer in layers_of(model):
            del layer.attend
        model.embedding.weight.requires_grad_(False).grad = None
    return layers


def separate(tokens: Tensor, length: int) -> tuple[Tensor, PackedLayout]:
    """Return the labels and the layout of sequences of `length` tokens, [rows · length], each one document."""
    labels = tokens.roll(-1)
    labels[length - 1 :: length] = IGNORE
    return labels, PackedLayout.from_lengths([length] * (len(tokens) // length)).to(tokens.device)


def scale_of(model: Decoder, layers: list[list[Tensor]]) -> float:
    """Return the factor of the logits. layers: from `capture`."""
    return layers_of(model)[0].scale or layers[0][0].shape[-1] ** -0.5


class Tiles(NamedTuple):
    """Shares of tiles of ROWS queries × KEYS keys.

    live: the share of causal tiles that some row enters with a remaining stick of at least THRESHOLD.
    faint: for each bound of FAINT, the share of live tiles in which no row spends more than the bound.
    """

    live: float
    faint: tuple[float, ...]


@torch.no_grad()
def count_tiles(q: Tensor, k: Tensor, length: int, scale: float) -> Tiles:
    """Count tiles in sequences of `length` tokens. q: [T, N, H]. k: [T, K, H]."""
    live = visible = 0
    faint = [0] * len(FAINT)
    group = q.shape[1] // k.shape[1]
    for first in range(0, q.shape[0], length):
        k_all = k[first : first + length].transpose(0, 1).repeat_interleave(group, 0)
        for start in range(0, length, 8 * ROWS):
            end = min(start + 8 * ROWS, length)
            z = (scale * (q[first + start : first + end].transpose(0, 1) @ k_all[:, :end].transpose(1, 2))).float()
            position = torch.arange(start, end, device=q.device)[:, None]
            seen = torch.arange(end, device=q.device) < position
            spent = torch.where(seen, softplus(z), 0.0)
            missing = (
                -end % KEYS,
                start - end + -(-(end - start) // ROWS) * ROWS,
            )  # padding to whole tiles: (keys, rows)
            spent = torch.nn.functional.pad(spent, (0, missing[0], 0, missing[1])).unflatten(-1, (-1, KEYS)).sum(-1)
            entering = spent.flip(-1).cumsum(-1).flip(-1) - spent  # spent by the nearer tiles
            reaches = torch.arange(0, end, KEYS, device=q.device) < position
            reaches = torch.nn.functional.pad(reaches, (0, 0, 0, missing[1]))
            alive = (reaches & ((-entering).exp() >= THRESHOLD)).unflatten(1, (-1, ROWS)).any(2)
            most = spent.unflatten(1, (-1, ROWS)).amax(2)
            live += int(alive.sum())
            faint = [count + int((alive & (most < bound)).sum()) for count, bound in zip(faint, FAINT, strict=True)]
            visible += int(reaches.unflatten(0, (-1, ROWS)).any(1).sum()) * q.shape[1]
    return Tiles(live / visible, tuple(count / live for count in faint))


def softmax_reference(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, None]:
    """Causal softmax attention of one sequence, computed in at least float32. q, k, v: [T, N, H]."""
    precise = torch.promote_types(q.dtype, torch.float32)
    z = scale * torch.einsum("ind,jnd->nij", q.to(precise), k.to(precise))
    future = torch.ones(z.shape[1:], dtype=torch.bool, device=z.device).triu(1)
    weights = z.masked_fill(future, float("-inf")).softmax(-1)
    return torch.einsum("nij,jnd->ind", weights, v.to(precise)).to(q.dtype), None


def flash_attention(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, None]:
    """FlashAttention-2 of one sequence. q, k, v: [T, N, H]."""
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
        return scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)[0].transpose(0, 1), None


def heads_of(layer: list[Tensor]) -> list[list[Tensor]]:
    """Return [q, k, v, dO] of the first query head of every key head."""
    q, k, v, grad = layer
    group = q.shape[1] // k.shape[1]
    return [
        [q[:, h : h + 1], k[:, h // group, None], v[:, h // group, None], grad[:, h : h + 1]]
        for h in range(0, q.shape[1], group)
    ]


def worst_error(function: Kernel, reference: Kernel, layer: list[Tensor], length: int, scale: float) -> str:
    """Format error ratios for o, dq, dk and dv on the first sequence, as the largest over the heads.

    A ratio is the error of `function` over that of `reference` with inputs and outputs in the same dtype. Errors are
    measured against `reference` in float64, as the largest error and as the root mean square.
    """
    worst = torch.zeros(4, 2)
    for part in heads_of([x[:length] for x in layer]):

        def run(function: Kernel, dtype: torch.dtype, part: list[Tensor]) -> list[Tensor]:
            leaves = [x.to(dtype).requires_grad_() for x in part[:3]]
            o = function(*leaves, scale=scale)[0]
            return [o.detach(), *torch.autograd.grad(o, leaves, part[3].to(dtype))]

        exact = run(reference, torch.float64, part)
        ours, plain = (
            torch.stack(
                [torch.stack([(a - e).abs().max(), (a - e).square().mean().sqrt()]) for a, e in zip(found, exact)]
            )
            for found in (run(function, layer[0].dtype, part), run(reference, layer[0].dtype, part))
        )
        worst = worst.maximum((ours / plain.clamp(min=1e-300)).cpu())
    return ", ".join(f"{name} {a:.2f} / {b:.2f}" for name, (a, b) in zip(("o", "dq", "dk", "dv"), worst.tolist()))


def timed(function: Callable[..., Tensor], layer: list[Tensor]) -> Times:
    """Return milliseconds of forward and backward. These are medians on a GPU, and one call on a CPU."""
    if layer[0].is_cuda:
        from ssscale_kernels.stickbreaking.benchmark import forward_and_backward

        return forward_and_backward(function, [layer], budget_ms=30)
    leaves = [x.detach().requires_grad_() for x in layer[:3]]
    start = time.perf_counter()
    o = function(*leaves)
    middle = time.perf_counter()
    torch.autograd.grad(o, leaves, layer[3])
    return 1e3 * (middle - start), 1e3 * (time.perf_counter() - middle)


def softmax(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal softmax attention with the selected backend. q: [B, N, T, H]. k, v: [B, K, T, H]."""
    return scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])


def measure(layer: list[Tensor], length: int, scale: float) -> dict[str, Times]:
    """Time one layer with skipping, without skipping ("dense"), and softmax attention on the same tensors."""
    batch = layer[0].shape[0] // length
    cu = torch.arange(0, (batch + 1) * length, length, dtype=torch.int32, device=layer[0].device)

    def ours(q: Tensor, k: Tensor, v: Tensor, skip_below: float) -> Tensor:
        return stickbreaking_attention(
            q, k, v, cu_seqlens_q=cu, max_seqlen_q=length, max_seqlen_k=length, scale=scale, skip_below=skip_below
        )[0]

    times = {name: timed(partial(ours, skip_below=s), layer) for name, s in (("ours", THRESHOLD), ("dense", 0.0))}
    four = [x.unflatten(0, (batch, length)).transpose(1, 2) for x in layer]
    for name, backend in BASELINES.items() if layer[0].is_cuda else ():
        with sdpa_kernel(backend):
            times[name] = timed(softmax, four)
    return times


def report(model: Decoder, tokens: Tensor, length: int) -> None:
    """Print all measurements at one length. tokens: [rows · length] int64."""
    tokens = tokens.to(model.groups.device)
    labels, layout = separate(tokens, length)
    layers = capture(model, tokens, labels, layout)
    shape = "×".join(map(str, (len(tokens) // length, layers[0][0].shape[1], length, layers[0][0].shape[2])))
    scale = scale_of(model, layers)
    print(f"\n{shape} (batch, heads, length, head dim), {layers[0][0].dtype}, ms forward / backward")
    rows = []
    for number, layer in enumerate(layers):
        tiles = count_tiles(layer[0], layer[1], length, scale)
        times = measure(layer, length, scale)
        if number == 0:
            print("| layer | live tiles | " + " | ".join(times) + " | ours ÷ (live × dense) |")
            print("|---|---|" + "---|" * (len(times) + 1))
        rows.append((tiles, times))
        _print_row(str(number), tiles.live, times)
    live = statistics.mean(tiles.live for tiles, _ in rows)
    sums = {name: (sum(t[name][0] for _, t in rows), sum(t[name][1] for _, t in rows)) for name in rows[0][1]}
    _print_row("all", live, sums)
    print(f"share of row blocks in which 16 keys spend more than {' / '.join(map(str, BITS))} bits:")
    for number, (q, k, *_) in enumerate(layers):
        print(f"layer {number}: {blocks_beyond(q, k, length, scale)}", flush=True)
    for which, bound in enumerate(FAINT):
        shares = ", ".join(f"{tiles.faint[which]:.2f}" for tiles, _ in rows)
        print(f"share of live tiles in which no row spends more than {bound:.1e}, by layer: {shares}")
    if length <= LONGEST_CHECKED:
        for number, layer in enumerate(layers):
            exact = partial(stickbreaking_attention, skip_below=0.0)
            ours = worst_error(exact, stickbreaking_reference, layer, length, scale)
            flash = (
                worst_error(flash_attention, softmax_reference, layer, length, scale) if "FA2" in sums else "not run"
            )
            print(
                f"layer {number}, error relative to float32 torch, largest / rms: {ours}; "
                f"FA2 relative to softmax: {flash}",
                flush=True,
            )
    if "FA2" in sums:
        total = sum(sums["ours"])
        against = ", ".join(f"{total / sum(sums[name]):.2f} × {name}" for name in BASELINES)
        print(f"whole model at {length}: {against}", flush=True)
    evaluate(model, tokens, labels, layout)


def _print_row(name: str, live: float, times: dict[str, Times]) -> None:
    cells = " | ".join(f"{a:.3f} / {b:.3f}" for a, b in times.values())
    ratio = sum(times["ours"]) / (live * sum(times["dense"]))
    print(f"| {name} | {live:.3f} | {cells} | {ratio:.2f} |", flush=True)


@torch.no_grad()
def evaluate(model: Decoder, tokens: Tensor, labels: Tensor, layout: PackedLayout) -> None:
    """Print loss and time of the whole model's forward pass, with and without skipping."""
    results = {}
    for name, skip_below in (("on", THRESHOLD), ("off", 0.0)):
        for layer in layers_of(model):
            layer.mixer = replace(layer.mixer, skip_below=skip_below)
        seconds = []
        for _ in range(8 if tokens.is_cuda else 1):
            start = time.perf_counter()
            loss = float(model(tokens, layout, labels).sum() / (labels >= 0).sum())  # waits for the GPU
            seconds.append(time.perf_counter() - start)
        results[name] = statistics.median(seconds)
        print(f"evaluation, skipping {name}: {1e3 * results[name]:.1f} ms, {len(tokens)} tokens, loss {loss:.5f}")
    for layer in layers_of(model):
        layer.mixer = replace(layer.mixer, skip_below=THRESHOLD)
    print(f"skipping shortens the evaluation by {1 - results['on'] / results['off']:.1%}", flush=True)


@torch.no_grad()
def decode(model: Decoder, tokens: Tensor, length: int) -> str:
    """Decode 200 tokens of every sequence greedily, and compare them with the argmax of a full forward pass.

    Returns a sentence with the result.
    """
    device = model.groups.device
    prompts = [row[: PROMPT + 37 * i].tolist() for i, row in enumerate(tokens.unflatten(0, (-1, length)))]
    start = time.perf_counter()
    texts = generate(model, prompts, NEW_TOKENS)
    seconds = time.perf_counter() - start
    same = total = 0
    furthest = 0.0
    for prompt, text in zip(prompts, texts, strict=True):
        layout = PackedLayout.from_lengths([len(prompt) + len(text)]).to(device)
        logits = model(torch.tensor(prompt + text, device=device), layout)[len(prompt) - 1 : -1].float()
        chosen = torch.tensor(text, device=device)
        equal = logits.argmax(-1) == chosen
        same, total = same + int(equal.sum()), total + len(text)
        behind = logits.amax(-1) - logits.gather(1, chosen[:, None])[:, 0]
        furthest = max(furthest, float(behind.max()))
    name = str(next(model.parameters()).dtype).removeprefix("torch.")
    return (
        f"decoding {len(prompts)} texts in {name}: {same} of {total} tokens are the argmax of the full pass; the "
        f"logits of the others are at most {furthest:.3f} lower; {1e3 * seconds / NEW_TOKENS:.1f} ms per step"
    )
