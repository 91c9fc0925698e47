"""Checks, then times, the optimizer step over flat buffers on one CUDA GPU:

python -m ssscale_kernels.adamw.benchmark [--elements N] [--tilings] [--check]

Prints a table of ms and TB/s beside torch's clipping, fused AdamW, copy and zeroing on the same flat buffers. --tilings also
times other launch settings. --check ends after the checks.
"""

import argparse
import itertools
import statistics
from collections.abc import Callable, Iterable
from datetime import date
from functools import partial

import torch
from ssscale_kernels.adamw import FlatAdamW, Segment, Settings, adamw_reference, clip_factor
from ssscale_kernels.adamw.bounds import exact_and_bounds, share_of_bounds
from ssscale_kernels.adamw.launch import Tiling, TritonPath
from ssscale_kernels.adamw.torch_path import fused_adamw
from ssscale_kernels.gpu import require_gpu
from ssscale_kernels.sums import sum_in_order
from torch import Tensor

DEVICE = torch.device("cuda", 0)
SETTINGS = Settings(lr=1e-4, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1, step=3)
SIZES = (1, 7, 4096, 4097, 100_003, 3_000_000)  # of the segments that are checked
FAR = 2**31 + 4099  # a segment with more elements than 32 bits can count
REPEATS = 10


def segment(n: int, seed: int = 0, counted: bool = True) -> tuple[Segment, Tensor]:
    """A segment of n elements with random state, and an fp32 gradient."""
    generator = torch.Generator(DEVICE).manual_seed(seed)

    def draw(scale: float) -> Tensor:
        return torch.empty(n, device=DEVICE).normal_(0.0, scale, generator=generator)

    master = draw(0.02)
    return Segment(master, draw(1e-4), draw(1e-4).square_(), master.bfloat16(), counted=counted), draw(1e-3)


def part(s: Segment, where: slice) -> Segment:
    return Segment(s.master[where], s.exp_avg[where], s.exp_avg_sq[where], s.rounded[where], counted=s.counted)


def state_of(s: Segment) -> tuple[Tensor, Tensor, Tensor]:
    return s.master.clone(), s.exp_avg.clone(), s.exp_avg_sq.clone()


def on_cpu(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Copies. The reference runs on the CPU, as in the tests that compare it with the kernels under Triton's interpreter."""
    return [tensor.to("cpu", copy=True) for tensor in tensors]


def check(dtype: torch.dtype, offset: int) -> bool:
    """Compares kernels with the reference bit by bit, and them and torch's fused AdamW with float64 (`bounds`).

    offset: elements by which segments miss 16 bytes.
    """
    made = [segment(n + offset, seed, counted=seed != 1) for seed, n in enumerate(SIZES)]
    held = [part(s, slice(offset, None)) for s, _ in made]
    gradients = [g.to(dtype)[offset:] for _, g in made]
    before = [state_of(s) for s in held]
    optimizer = FlatAdamW(held)
    total, again = optimizer.sum_of_squares(gradients), optimizer.sum_of_squares(gradients)
    exact = sum(float(g.double().square().sum()) for g, s in zip(gradients, held, strict=True) if s.counted)
    _, factor = clip_factor(total, 1.0)
    optimizer.update(gradients, [SETTINGS], clip_factor(torch.full_like(total, torch.inf), 1.0)[1])
    same = all(torch.equal(s.master, state[0]) for s, state in zip(held, before, strict=True))
    optimizer.update(gradients, [SETTINGS], factor)
    ours, theirs, differ, apart = 0.0, 0.0, 0, 0
    for s, state, gradient in zip(held, before, gradients, strict=True):
        w, m, v = old = on_cpu(state)
        given = (old, gradient.cpu(), SETTINGS, factor.cpu())
        wanted = adamw_reference(w, m, v, *given[1:])
        fused_adamw(state, gradient.float() * factor, SETTINGS)
        found, torchs = on_cpu((s.master, s.exp_avg, s.exp_avg_sq)), on_cpu(state)
        differ += sum(int((a != b).sum()) for a, b in zip(found, wanted, strict=True))
        apart += sum(int((a != b).sum()) for a, b in zip(found, torchs, strict=True))
        ours = max(ours, share_of_bounds(found, *exact_and_bounds(*given)))
        theirs = max(theirs, share_of_bounds(torchs, *exact_and_bounds(*given, single=True)))
        same &= torch.equal(s.rounded, s.master.bfloat16())
    good = same and torch.equal(total, again) and abs(float(total) / exact - 1) < 1e-6
    good &= differ == 0 and ours <= 1 and theirs <= 1
    print(
        f"# {dtype}, offset {offset}: {differ:,} of {3 * sum(SIZES):,} values differ from the reference. Errors against "
        f"float64: {ours:.2f} of the bound; torch's fused AdamW, which differs in {apart:,} values: {theirs:.2f} of its bound: "
        f"{'good' if good else 'WRONG'}",
        flush=True,
    )
    return good


def check_parts(parts: int, offset: int) -> bool:
    """Compares the update of bf16 gradients in parts with that of their fp32 sums, bit by bit, and their norms.

    The norm's order of addition depends on the width of gradients, so norms agree only within 1e-6. offset: as in `check`.
    """
    made = [segment(n + offset, seed)[0] for seed, n in enumerate(SIZES)]
    held = [part(s, slice(offset, None)) for s in made]
    same = [Segment(*(getattr(s, name).clone() for name in Segment.TENSORS)) for s in held]
    given, sums = [], []
    for n in SIZES:
        drawn = [torch.randn(2, n + offset, device=DEVICE) for _ in range(parts)]
        found = [(x * 10 ** (3 * scale)).bfloat16()[offset:] for x, scale in drawn]
        sums.append(torch.empty(n, device=DEVICE))
        sum_in_order(found, sums[-1])
        given += found
    ours, theirs = FlatAdamW(held), FlatAdamW(same)
    total, expected = ours.sum_of_squares(given, parts), theirs.sum_of_squares(sums)
    _, factor = clip_factor(expected, 1.0)
    ours.update(given, [SETTINGS], factor, parts)
    theirs.update(sums, [SETTINGS], factor)
    pairs = zip(held, same, strict=True)
    good = all(torch.equal(getattr(a, name), getattr(b, name)) for a, b in pairs for name in Segment.TENSORS)
    good &= torch.equal(total, ours.sum_of_squares(given, parts)) and abs(float(total / expected) - 1) < 1e-6
    print(f"# bf16 in {parts} parts, offset {offset}: {'good' if good else 'WRONG'}", flush=True)
    return good


def check_far() -> bool:
    """A segment of more than 2^31 elements: its last elements are updated as they are by themselves."""
    if torch.cuda.mem_get_info()[0] < 30 * FAR:
        print(f"# {FAR:,} elements: not enough memory, not checked", flush=True)
        return True
    whole, gradient = segment(FAR)
    last = slice(FAR - 5000, FAR)
    w, m, v = on_cpu(state_of(part(whole, last)))
    factor = torch.full((), 0.5, device=DEVICE)
    wanted = adamw_reference(w, m, v, gradient[last].cpu(), SETTINGS, factor.cpu())
    optimizer = FlatAdamW([whole])
    optimizer.update([gradient], [SETTINGS], factor)
    exact = sum(float(piece.double().square().sum()) for piece in gradient.split(2**28))
    good = (
        all(torch.equal(a, b) for a, b in zip(on_cpu(state_of(part(whole, last))), wanted, strict=True))
        and abs(float(optimizer.sum_of_squares([gradient])) / exact - 1) < 1e-6
    )
    print(f"# {FAR:,} elements: {'good' if good else 'WRONG'}", flush=True)
    return good


def milliseconds(function: Callable[[], object]) -> float:
    """The median time on the GPU, of REPEATS calls after two."""
    times = []
    for _ in range(REPEATS + 2):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        function()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times[2:])


def row(name: str, num_bytes: float, ms: float) -> None:
    """num_bytes: read and written."""
    print(f"| {name} | {num_bytes / 1e9:.1f} | {ms:.2f} | {num_bytes / ms / 1e9:.2f} |", flush=True)


def time_ours(
    held: list[Segment], gradients: dict[str, list[Tensor]], name: str, optimizer: FlatAdamW, parts: int = 1
) -> None:
    """gradients: by their names, `parts` tensors per segment."""
    factor, total = torch.full((), 0.5, device=DEVICE), sum(s.master.numel() for s in held)
    for dtype, given in gradients.items():
        width = parts * given[0].element_size()
        row(
            f"{name}: norm, {dtype} gradients",
            width * total,
            milliseconds(partial(optimizer.sum_of_squares, given, parts)),
        )
        ms = milliseconds(partial(optimizer.update, given, [SETTINGS], factor, parts))
        row(f"{name}: update, {dtype} gradients", (26 + width) * total, ms)


def time_torch(held: Segment, gradient: Tensor) -> None:
    """The passes of DeepSpeed's step, on one flat buffer."""
    n = held.master.numel()
    weight = held.master
    weight.grad = gradient
    state = [torch.tensor(3.0, device=DEVICE)]
    lr, beta1, beta2, eps, weight_decay, _ = SETTINGS
    options = {"lr": lr, "beta1": beta1, "beta2": beta2, "eps": eps, "weight_decay": weight_decay}
    tensors = [[weight], [gradient], [held.exp_avg], [held.exp_avg_sq], [], state]
    # Every call clips: the norm is above this one.
    clipped = milliseconds(lambda: torch.nn.utils.clip_grad_norm_([weight], 1e-9 * float(n) ** 0.5))
    row("torch: clip_grad_norm_", 12 * n, clipped)
    row(
        "torch: fused AdamW",
        28 * n,
        milliseconds(lambda: torch._fused_adamw_(*tensors, **options, amsgrad=False, maximize=False)),
    )
    row("torch: copy to bf16", 6 * n, milliseconds(lambda: held.rounded.copy_(weight)))
    row("torch: zero the gradient", 4 * n, milliseconds(gradient.zero_))


def measure(elements: int, tilings: bool) -> None:
    print(f"{elements:,} elements; {torch.cuda.get_device_name()}, torch {torch.__version__}, {date.today()}")
    print("| what | GB | ms | TB/s |\n|---|---|---|---|", flush=True)
    held, gradient = segment(elements)
    # As many weights as 1b has, of unequal sizes, for the tables.
    cuts = [elements * (i + i % 2) // 200 for i in range(0, 201, 2)]
    places = [slice(a // 8 * 8, b // 8 * 8) for a, b in itertools.pairwise(cuts)]
    split = [part(held, where) for where in places]
    wide, narrow = [gradient[where] for where in places], [gradient[where].bfloat16() for where in places]
    name, optimizer = f"{len(split)} segments", FlatAdamW(split)
    time_ours(split, {"fp32": wide, "bf16": narrow}, name, optimizer)
    pairs = [part for g in narrow for part in (g, g.flip(0))]
    time_ours(split, {"two parts of bf16": pairs}, name, optimizer, parts=2)
    if tilings:
        for chunk, block, num_warps in itertools.product((2048, 4096, 16384), (512, 1024, 2048), (4, 8)):
            optimizer.path = TritonPath(split, Tiling(chunk, block, num_warps, chunk, block, num_warps))
            time_ours(
                split, {"fp32": wide, "bf16": narrow}, f"chunk {chunk}, block {block}, {num_warps} warps", optimizer
            )
    time_torch(held, gradient)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--elements", type=int, default=1_200_000_000, help="per buffer")
    parser.add_argument("--tilings", action="store_true", help="also time other launch settings")
    parser.add_argument("--check", action="store_true", help="only check")
    options = parser.parse_args()
    require_gpu()
    found = [check(dtype, offset) for dtype in (torch.float32, torch.bfloat16) for offset in (0, 1)]
    found += [check_parts(parts, offset) for parts in (2, 3, 8) for offset in (0, 1)]
    if not (all(found) and check_far()):
        raise SystemExit(1)
    if not options.check:
        measure(options.elements, options.tilings)


if __name__ == "__main__":
    main()
