"""Parallel layouts on the GPUs of one machine, in runs of launch/pretrain.py on real text:

python launch/benchmark_parallel.py part=losses gpus=4 data=FOLDER [config=1b_ssmax] [rows=16] [steps=50] [folder=runs] [...]

part=losses   the losses of each layout beside those of data parallelism, and of that in another order of reduction
part=speed    tokens/s and peak memory of each layout, rows / data ranks in a microbatch, the memory beside the estimate's
part=long     the layouts with context parallelism alone; for data of long rows
part=weak     tokens/s a GPU on one GPU and on all, ZeRO-1, accumulation 1, rows / gpus on each
part=skip     a ring of all GPUs with skip_below as configured and 0; give init_from=RUN of a trained model

Medians of the steps after the fourth. What is left over is passed on to every run.
"""

import os
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

if not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from launch.cli import run, take_options
from ssscale.config import load_config
from ssscale.errors import UserError
from ssscale.train.estimate import memory_per_gpu
from ssscale.train.metrics import read_metrics

ROOT = Path(__file__).resolve().parents[1]
GIB = 2**30
OPTIONS = {"part": str, "gpus": int, "data": str, "config": str, "rows": int, "steps": int, "folder": str}
PARTS = ("losses", "speed", "long", "weak", "skip")


class Run(NamedTuple):
    label: str
    gpus: int
    tensor: int = 1
    ulysses: int = 1
    ring: int = 1
    keys: tuple[str, ...] = ()
    environment: tuple[tuple[str, str], ...] = ()


class Found(NamedTuple):
    losses: list[float]
    tokens_per_second: float
    memory_gib: float  # of rank 0; nan on CPUs
    estimate_gib: float


def layouts(gpus: int) -> list[Run]:
    """Data parallelism first; then all GPUs, or half of them, in a group of each kind."""
    half = gpus // 2
    found = [Run(f"DP{gpus}", gpus)]
    if half > 1:
        found.append(Run(f"TP2 x DP{half}", gpus, tensor=2))
    found += [Run(f"TP{gpus}", gpus, tensor=gpus), Run(f"ring {gpus}", gpus, ring=gpus)]
    found.append(Run(f"Ulysses {gpus}", gpus, ulysses=gpus))
    if half > 1:
        found += [Run(f"ring 2 x TP{half}", gpus, tensor=half, ring=2), Run("ulysses 2 x ring 2", gpus, 1, 2, half)]
    return found


def runs_of(part: str, gpus: int) -> list[Run]:
    every = layouts(gpus)
    if part == "losses":
        other = every[0]._replace(label=f"DP{gpus}, reduced as a tree", environment=(("NCCL_ALGO", "Tree"),))
        # Where the library has one algorithm only, sums over two microbatches are another order too.
        again = every[0]._replace(label=f"DP{gpus}, two microbatches", keys=("halve",))
        return [every[0], other, again, *every[1:]]
    if part == "long":
        return [layout for layout in every if layout.ulysses * layout.ring == gpus]
    if part == "weak":
        return [Run("DP1", 1), every[0]]
    if part == "skip":
        ring = Run(f"ring {gpus}", gpus, ring=gpus)
        return [ring, ring._replace(label=f"ring {gpus}, skip_below=0", keys=("model.attention.skip_below=0",))]
    return every


def execute(layout: Run, options: dict[str, Any], extra: list[str]) -> Found | None:
    name, rows, steps = options["config"], options["rows"], options["steps"]
    if options["part"] == "weak":
        rows = rows // options["gpus"] * layout.gpus
    data_ranks = layout.gpus // (layout.tensor * layout.ulysses * layout.ring)
    parts = 2 if "halve" in layout.keys else 1
    folder = Path(options["folder"]) / f"parallel_{name}"
    shutil.rmtree(folder, ignore_errors=True)
    keys: dict[str, Any] = {
        "config": name,
        "data.path": options["data"],
        "parallel.tensor": layout.tensor,
        "parallel.ulysses": layout.ulysses,
        "parallel.ring": layout.ring,
        "train.microbatch": rows // data_ranks // parts,
        "train.batch_size": rows,
        "train.max_steps": steps,
        "train.log_every": 1,
        "train.eval_every": 0,
        "train.save_every": 0,
        "train.observe_every": 0,
    }
    stages = len(load_config([f"config={name}"]).train.stages)
    keys |= {f"train.stages.{stage}.mix": "null" for stage in range(stages)}
    arguments = [f"{key}={value}" for key, value in keys.items()] + extra
    arguments += [key for key in layout.keys if key != "halve"]
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc_per_node={layout.gpus}", "launch/pretrain.py"]
    began = time.perf_counter()
    process = subprocess.run(
        [*command, *arguments, f"run_dir={folder}"],
        cwd=ROOT,
        env=os.environ | dict(layout.environment),
        capture_output=True,
        text=True,
        check=False,
    )
    print(f"# {layout.label}: {time.perf_counter() - began:.0f} s, exit {process.returncode}", flush=True)
    if process.returncode:
        print((process.stdout + process.stderr)[-4000:], flush=True)
        return None
    records = [record for record in read_metrics(folder / "metrics.jsonl") if "loss" in record]
    settled = records[4:] or records
    memory = memory_per_gpu(load_config([argument for argument in arguments if "run_dir" not in argument]), layout.gpus)
    return Found(
        [record["loss"] for record in records],
        statistics.median(record["tokens_per_second"] for record in settled),
        max(record.get("memory_gib", float("nan")) for record in settled),
        memory.total / GIB,
    )


def show_losses(found: dict[str, Found]) -> None:
    first = next(iter(found.values())).losses
    print("| layout | first loss | last loss | largest difference | mean difference |\n|---|---|---|---|---|")
    for label, result in found.items():
        differences = [abs(a - b) for a, b in zip(result.losses, first, strict=True)]
        ends = f"{result.losses[0]:.5f} | {result.losses[-1]:.5f}"
        print(f"| {label} | {ends} | {max(differences):.2e} | {statistics.mean(differences):.2e} |")


def show_speed(found: dict[str, Found], runs: list[Run]) -> None:
    gpus = {layout.label: layout.gpus for layout in runs}
    first = next(iter(found))
    print(
        "| layout | tokens/s | a GPU | of the first | peak GiB | estimate GiB | last loss |\n|---|---|---|---|---|---|---|"
    )
    base = found[first].tokens_per_second / gpus[first]
    for label, result in found.items():
        each = result.tokens_per_second / gpus[label]
        cells = f"{result.tokens_per_second:,.0f} | {each:,.0f} | {each / base:.3f} | {result.memory_gib:.1f}"
        print(f"| {label} | {cells} | {result.estimate_gib:.1f} | {result.losses[-1]:.3f} |")


def main(argv: list[str]) -> None:
    options, extra = take_options(argv, OPTIONS)
    for key in ("part", "gpus", "data"):
        if key not in options:
            raise UserError(f"{key}= is missing")
    if options["part"] not in PARTS:
        raise UserError(f"part must be one of {', '.join(PARTS)}, not {options['part']!r}")
    options = {"config": "1b_ssmax", "rows": 4 * options["gpus"], "steps": 50, "folder": "runs"} | options
    runs = runs_of(options["part"], options["gpus"])
    results = {layout.label: execute(layout, options, extra) for layout in runs}
    found = {label: result for label, result in results.items() if result is not None}
    if not found:
        raise UserError("none of the runs came to its end: see above")
    print(f"{options['config']}, {options['rows']} rows a step, {options['steps']} steps")
    if options["part"] == "losses":
        show_losses(found)
    else:
        show_speed(found, runs)


if __name__ == "__main__":
    run(main, __doc__)
