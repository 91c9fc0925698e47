"""The stack's training step beside plain torch's, in one run on one GPU:

python launch/benchmark.py configs=1b_softmax,1b_ssmax data=FOLDER [microbatch=4] [accumulation=1,16] [steps=100,8] [...]

measure=saves: what a save in the background costs beside a blocking one; measure=metrics: what all metrics cost (each
three times in turn, on the first of `configs`).

Each row is a run of launch/pretrain.py through torchrun (real data, streaming, Megatron layers, DeepSpeed, metrics), or of
eval/plain_torch.py; the ratio is to plain torch at the same accumulation. Medians over the steps after the first four.
"""

import json
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

if not __package__:
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from launch.cli import run, take_options
from ssscale.config import load_config
from ssscale.errors import UserError
from ssscale.train.metrics import read_metrics

ROOT = Path(__file__).resolve().parents[1]
OPTIONS = {
    "configs": str,
    "data": str,
    "microbatch": int,
    "accumulation": str,
    "steps": str,
    "folder": str,
    "plain": int,
    "measure": str,
}
COLUMNS = ("tokens_per_second", "mfu", "mfu_causal", "memory_gib", "first_step_s")


def run_stack(name: str, options: dict[str, Any], accumulation: int, steps: int, extra: list[str]) -> dict[str, float]:
    """One run of the stack; its medians."""
    folder = Path(options.get("folder", "runs")) / f"benchmark_{name}_{accumulation}"
    shutil.rmtree(folder, ignore_errors=True)
    microbatch = options.get("microbatch", 4)
    keys = {
        "config": name,
        "run_dir": folder,
        "data.path": options["data"],
        "data.one_document": "true",
        "train.microbatch": microbatch,
        "train.batch_size": microbatch * accumulation,
        "train.max_steps": steps,
        "train.log_every": 1,
        "train.eval_every": 0,
        "train.save_every": 0,
    }
    stages = len(load_config([f"config={name}"]).train.stages)
    keys |= {f"train.stages.{stage}.mix": "null" for stage in range(stages)}
    arguments = [f"{key}={value}" for key, value in keys.items()] + extra
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=1", "launch/pretrain.py", *arguments]
    began = time.perf_counter()
    process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    print(f"# {name} x{accumulation}: {time.perf_counter() - began:.0f} s, exit {process.returncode}", flush=True)
    if process.returncode:
        print((process.stdout + process.stderr)[-6000:], flush=True)
        return {}
    first = [line for line in process.stderr.splitlines() if line.startswith("first step after")]
    records = [record for record in read_metrics(folder / "metrics.jsonl") if "loss" in record]
    print(f"# loss {records[0]['loss']:.3f} -> {records[-1]['loss']:.3f} in {len(records)} steps", flush=True)
    settled = records[4:] or records
    result = {key: statistics.median(record[key] for record in settled) for key in COLUMNS[:-1] if key in settled[0]}
    return result | {"first_step_s": float(first[0].split()[3])}


def run_plain(name: str, microbatch: int, accumulation: int, steps: int) -> dict[str, float]:
    command = [sys.executable, "-m", "eval.plain_torch", name, str(microbatch), str(accumulation), str(steps)]
    process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if process.returncode:
        print(process.stderr[-3000:], flush=True)
        return {}
    return json.loads(process.stdout.splitlines()[-1])


def records_of(name: str, options: dict[str, Any], steps: int, extra: list[str]) -> list[dict[str, Any]]:
    accumulation = int(options.get("accumulation", "1").split(",")[0])
    run_stack(name, options, accumulation, steps, extra)
    return read_metrics(Path(options.get("folder", "runs")) / f"benchmark_{name}_{accumulation}" / "metrics.jsonl")


def measure_saves(name: str, options: dict[str, Any], extra: list[str]) -> None:
    """Three saves each way; the dip is the share of the rate that is lost in the steps beside a write."""
    print("| save | blocked s | written s | GB a rank | dip in tokens/s |\n|---|---|---|---|---|")
    for background in ("true", "false"):
        keys = [f"train.save_background={background}", "train.save_every=60", "train.observe_every=0", "train.keep=1"]
        records = records_of(name, options, 241, [*extra, *keys])
        saves = [record for record in records if "saved_step" in record][:3]
        for save in saves:
            dip = "-" if save["save_dip"] is None else f"{save['save_dip']:.3f}"
            cells = (
                f"{save['save_blocked_s']:.2f} | {save['save_written_s']:.1f} | {save['save_bytes'] / 1e9:.1f} | {dip}"
            )
            print(f"| {'background' if background == 'true' else 'blocking'} | {cells} |", flush=True)


def measure_metrics(name: str, options: dict[str, Any], extra: list[str]) -> None:
    """Runs with every metric (a record every 10 steps, a look into attention every 50) and with one record, in turn."""
    rates: dict[str, list[float]] = {"all": [], "none": []}
    steps = 201
    for _ in range(3):
        for which in rates:
            keys = ["train.log_every=10", "train.observe_every=50"] if which == "all" else ["train.log_every=100"]
            keys += [] if which == "all" else ["train.observe_every=0", "train.spike_z=0", "train.watchdog=0"]
            records = records_of(name, options, steps, [*extra, *keys])
            # The second hundred steps, in which nothing compiles.
            settled = [
                record["tokens_per_second"] for record in records if "loss" in record and 100 < record["step"] <= 200
            ]
            rates[which].append(statistics.harmonic_mean(settled))
    cost = 1 - statistics.median(rates["all"]) / statistics.median(rates["none"])
    for which, found in rates.items():
        print(f"{which:<5} {', '.join(f'{rate:,.0f}' for rate in found)} tokens/s")
    print(f"all metrics cost {cost:.2%} of tokens/s")


def main(argv: list[str]) -> None:
    options, extra = take_options(argv, OPTIONS)
    measures = {"saves": measure_saves, "metrics": measure_metrics}
    if "measure" in options:
        if options["measure"] not in measures:
            raise UserError(f"measure must be one of {', '.join(measures)}, not {options['measure']!r}")
        measures[options["measure"]](options["configs"].split(",")[0], options, extra)
        return
    accumulations = [int(text) for text in options.get("accumulation", "1,16").split(",")]
    steps = [int(text) for text in options.get("steps", "100,8").split(",")]
    rows, plain = [], {}
    for name in options["configs"].split(","):
        shape = name.split("_")[0]
        for accumulation, count in zip(accumulations, steps):
            if (shape, accumulation) not in plain and options.get("plain", 1):
                arguments = (options.get("microbatch", 4), accumulation, min(count, 15))
                plain[shape, accumulation] = run_plain(f"{shape}_softmax", *arguments)
                rows.append((f"plain torch {shape}", accumulation, plain[shape, accumulation], 1.0))
            result = run_stack(name, options, accumulation, count, extra)
            peer = plain.get((shape, accumulation), {}).get("tokens_per_second")
            ratio = result["tokens_per_second"] / peer if result and peer else float("nan")
            rows.append((name, accumulation, result, ratio))
    print("| run | accumulation | tokens/s | of plain torch | MFU | MFU causal half | peak GiB | first step s |")
    print("|---|---|---|---|---|---|---|---|")
    for label, accumulation, result, ratio in rows:
        rate, mfu, half, memory, first = (result.get(key, float("nan")) for key in COLUMNS)
        cells = f"{rate:,.0f} | {ratio:.3f} | {mfu:.3f} | {half:.3f} | {memory:.1f} | {first:.0f}"
        print(f"| {label} | {accumulation} | {cells} |", flush=True)


if __name__ == "__main__":
    run(main, __doc__)
