"""python -m ssscale_kernels.stickbreaking.fuzz [--cases 10000] [--jobs 8]: random small sequences against float64.

Needs a CUDA GPU. A case is one sequence with random lengths of queries and keys, offset and size of logits. It is
packed with up to seven others and runs forward and backward. Before that, all memory that the kernels allocate is
filled with NaN. Settings (dtype, head dim, grouping, offsets, carried stick) come from a fixed list, because each needs
its own compiled kernels.
"""

import argparse
import random
import subprocess
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from ssscale_kernels.stickbreaking import stickbreaking_attention, stickbreaking_reference
from torch import Tensor

LONGEST = 200
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
UNIT = {BF16: 2**-8, FP16: 2**-11, FP32: 2**-20}  # unit of rounding; float32 sums in another order than the reference


class Setting(NamedTuple):
    dtype: torch.dtype
    head_dim: int
    group: int
    key_heads: int
    offsets: bool
    entering: bool


SETTINGS = [
    Setting(BF16, 64, 1, 2, False, False),
    Setting(BF16, 64, 8, 1, True, True),
    Setting(BF16, 32, 2, 2, False, False),
    Setting(BF16, 128, 4, 1, False, True),
    Setting(BF16, 80, 2, 1, True, False),
    Setting(BF16, 16, 1, 3, True, True),
    Setting(FP16, 64, 2, 1, False, False),
    Setting(FP16, 64, 1, 2, True, True),
    Setting(FP16, 128, 1, 2, False, False),
    Setting(FP16, 24, 8, 1, False, True),
    Setting(FP32, 64, 2, 1, False, False),
    Setting(FP32, 16, 1, 2, True, True),
    Setting(FP32, 128, 2, 1, False, False),
]


def starts(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32).cuda()


def draw(setting: Setting, rng: random.Random) -> tuple[list[Tensor], dict[str, Any], int]:
    """Returns the leaves (q, k, v and perhaps log_rest_in), the layout and the number of sequences."""
    count = rng.randint(1, 8)
    queries = [rng.choice((0, 1, 2, rng.randint(1, 70), rng.randint(1, LONGEST))) for _ in range(count)]
    queries[0] = max(queries[0], 1)
    layout: dict[str, Any] = {"cu_seqlens_q": starts(queries), "max_seqlen_q": LONGEST, "max_seqlen_k": LONGEST}
    keys = queries
    if setting.offsets:
        keys = [rng.randint(0, LONGEST) for _ in queries]
        keys[0] = max(keys[0], 1)
        offsets = [rng.randint(-3, n + 3) for n in keys]
        layout |= {"cu_seqlens_k": starts(keys), "q_offsets": torch.tensor(offsets, dtype=torch.int32).cuda()}
    heads, dim = setting.key_heads * setting.group, setting.head_dim
    shapes = (sum(queries), heads, dim), (sum(keys), setting.key_heads, dim), (sum(keys), setting.key_heads, dim)
    q, k, v = (torch.randn(shape, device="cuda") for shape in shapes)
    kind = rng.choice(("normal", "normal", "huge", "low", "one-hot"))
    if kind == "huge":
        q *= 30
    elif kind == "low":
        q, k = 1 + q.abs(), -1 - k.abs()
    elif kind == "one-hot":
        # A few keys take everything, and the others take nothing.
        q, k = 1 + q.abs(), torch.where(torch.rand_like(k[..., :1]) < 0.1, 8.0, -8.0) * (1 + k.abs())
    leaves = [x.to(setting.dtype) for x in (q, k, v)]
    if setting.entering:
        leaves.append(-3 * torch.rand(q.shape[:2], device="cuda"))
    return leaves, layout, count


def differentiate(
    function: Callable[..., tuple[Tensor, Tensor]],
    leaves: list[Tensor],
    grads: list[Tensor],
    exact: bool,
    **kwargs: Any,
) -> list[Tensor]:
    leaves = [(x.double() if exact else x).detach().requires_grad_() for x in leaves]
    entering = {"log_rest_in": leaves[3]} if len(leaves) == 4 else {}
    o, rest = function(*leaves[:3], **entering, **kwargs)
    outputs = [o, rest][: len(grads)]
    found = torch.autograd.grad(outputs, leaves, [g.to(x.dtype) for g, x in zip(grads, outputs)], allow_unused=True)
    return [x.detach() for x in (*outputs, *(g for g in found if g is not None))]


def run(setting: Setting, cases: int, seed: int) -> Counter[str]:
    """Runs the cases of a setting. Returns counts of sequences, results, non-finite results and mismatches."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    found: Counter[str] = Counter()
    while found["cases"] < cases:
        leaves, layout, count = draw(setting, rng)
        skip_below = rng.choice((0.0, 2**-12))
        # Skipping does not bound the error of log_rest, so only o and its gradients are compared.
        shapes = [leaves[0].shape, leaves[0].shape[:2]][: 1 if skip_below else 2]
        grads = [torch.randn(shape, device="cuda").to(setting.dtype).float() for shape in shapes]
        # Deterministic mode fills uninitialised memory with NaN.
        torch.use_deterministic_algorithms(True, warn_only=True)
        ours = differentiate(stickbreaking_attention, leaves, grads, False, skip_below=skip_below, **layout)
        torch.use_deterministic_algorithms(False)
        plain = differentiate(stickbreaking_reference, leaves, grads, False, **layout)
        exact = differentiate(stickbreaking_reference, leaves, grads, True, **layout)
        names = (*("o", "log_rest")[: len(grads)], "dq", "dk", "dv", "d_log_rest_in")
        numbers = {
            name: torch.stack([(a.double() - e).abs().amax(), (p.double() - e).abs().amax(), e.abs().amax()])
            for name, a, p, e in zip(names, ours, plain, exact)
            if e.numel()
        }
        for name, (error, allowed, size) in zip(numbers, torch.stack([*numbers.values()]).tolist(), strict=True):
            slack = 1e-5 * (1 + size) + (skip_below * 8 * (1 + size))
            found["results"] += 1
            found["not finite"] += error != error or error == float("inf")
            if error > 2 * allowed + slack:
                found[f"{name} over twice torch's error"] += 1
            # With few numbers, torch's largest error may be tiny by luck, so a unit of rounding is allowed as well.
            found["mismatches"] += not error <= 4 * allowed + 4 * UNIT[setting.dtype] * size + slack
        found["cases"] += count
        found["calls"] += 1
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=10_000)
    parser.add_argument("--jobs", type=int, default=8, help="processes that share the settings")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--job", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.job is None:
        jobs = [
            subprocess.Popen(
                [sys.executable, "-m", "ssscale_kernels.stickbreaking.fuzz", *sys.argv[1:], f"--job={job}"]
            )
            for job in range(arguments.jobs)
        ]
        sys.exit(max(abs(job.wait()) for job in jobs))
    warnings.simplefilter("ignore")
    failed = False
    each = -(-arguments.cases // len(SETTINGS))
    for number in range(arguments.job, len(SETTINGS), arguments.jobs):
        setting, start = SETTINGS[number], time.perf_counter()
        found = run(setting, each, arguments.seed + number)
        failed |= bool(found["not finite"] or found["mismatches"])
        counts = ", ".join(f"{value} {name}" for name, value in found.items())
        print(f"{tuple(setting)}: {counts}; {time.perf_counter() - start:.0f} s", flush=True)
    sys.exit(failed)


if __name__ == "__main__":
    main()
