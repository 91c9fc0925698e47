"""python -m ssscale_kernels.stickbreaking.fuzz [--cases 10000]: random small sequences against float64.

Needs a CUDA GPU. A case is one sequence with random lengths of queries and keys, offset and size of logits. It is
packed with up to seven others and runs forward and backward. Before that, all memory that the kernels allocate is
filled with NaN. Settings (dtype, head dim, grouping, offsets, carried stick) come from a fixed list, because each needs
its own compiled kernels.
"""

import argparse
import math
import random
import subprocess
import sys
import time
import warnings
from collections import Counter
from typing import NamedTuple

import torch
from ssscale_kernels.gpu import require_gpu
from ssscale_kernels.stickbreaking import accuracy
from ssscale_kernels.stickbreaking.accuracy import Case

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


def draw(setting: Setting, rng: random.Random, device: str, longest: int) -> Case:
    """Returns a case of up to eight sequences, some of them empty."""
    queries = [rng.choice((0, 1, 2, rng.randint(1, 70), rng.randint(1, longest))) for _ in range(rng.randint(1, 8))]
    queries[0] = max(queries[0], 1)
    heads = (setting.key_heads * setting.group, setting.key_heads)
    kind = rng.choice(("normal", *accuracy.KINDS))
    skip_below = rng.choice((0.0, accuracy.SKIP))
    # What skipping changes in gradients of log_rest has no bound.
    use = "o" if skip_below else "carried" if setting.entering else "log_rest"
    case = Case(setting.dtype, setting.head_dim, kind, use, skip_below, heads, tuple(queries))
    if setting.offsets:
        keys = [rng.randint(0, longest) for _ in queries]
        keys[0] = max(keys[0], 1)
        offsets = tuple(rng.randint(-3, n + 3) for n in keys)
        case = case._replace(keys=tuple(keys), offsets=offsets)
    elif not setting.entering and rng.random() < 0.5:
        case = case._replace(use="remainder")
    return case


def run(setting: Setting, cases: int, seed: int, device: str = "cuda", longest: int = LONGEST) -> Counter[str]:
    """Runs sequences of a setting. Returns counts of sequences, results, non-finite results and mismatches."""
    rng = random.Random(seed)
    found: Counter[str] = Counter()
    while found["cases"] < cases:
        case = draw(setting, rng, device, longest)
        seed_of_case = rng.randrange(1 << 30)
        inputs = accuracy.draw(case, device, seed_of_case)
        # Deterministic mode fills uninitialised memory with NaN.
        torch.use_deterministic_algorithms(True, warn_only=True)
        errors = accuracy.compare(inputs)
        torch.use_deterministic_algorithms(False)
        for name, error in errors.items():
            found["results"] += 1
            found["not finite"] += not math.isfinite(error.beyond)
            if not accuracy.share(error) <= 1:
                found[f"{name} over what is allowed"] += 1
                print(
                    f"{name}: {error}, accuracy.draw({case}, {device!r}, {seed_of_case})", file=sys.stderr, flush=True
                )
            # With few numbers, torch's largest error may be tiny by luck, so a unit of rounding is allowed as well.
            slack = 4 * UNIT[setting.dtype] * error.size + 1e-5 * (1 + error.size)
            found["mismatches"] += not error.beyond <= 4 * error.plain + slack
        found["cases"] += len(case.lengths)
        found["calls"] += 1
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=10_000)
    parser.add_argument("--jobs", type=int, default=8, help="processes that share the settings")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--job", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    require_gpu()
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
