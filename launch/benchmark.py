"""Benchmark of the stack's training step against plain torch, in one run on one GPU.

Each row of the table is a run of launch/pretrain.py (real data, streaming, Megatron layers, DeepSpeed, metrics) or of
eval/benchmarks/plain_torch.py. Ratios are to plain torch with the same accumulation. Figures are medians over the steps
after the first four, or over the last ones. A run file may have keys of its own: configs=NAME,NAME+KEY=VALUE+KEY=VALUE.
"""

import json
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from launch.boot import EVERY_KEY, ROOT, Command, Option, run
from ssscale.config import load_config
from ssscale.errors import UserError
from ssscale.train.records import read_metrics

COMMAND = Command(
    about=__doc__,
    usage="python launch/benchmark.py configs=NAME,... data=FOLDER [key=value ...]",
    example="python launch/benchmark.py configs=1b_softmax,1b_ssmax data=data/pretrain accumulation=1,16 steps=100,8",
    options=(
        Option("configs", str, "run files", metavar="NAME,...", required=True),
        Option("data", str, "a packed data folder", metavar="FOLDER", required=True),
        Option("microbatch", int, "rows per microbatch", default=4, at_least=1),
        Option("accumulation", str, "microbatches per step, one run each", default="1,16", metavar="N,..."),
        Option("steps", str, "steps of each of these runs", default="100,8", metavar="N,..."),
        Option("last", int, "last steps that medians are over; 0: all after the first four", default=0, at_least=0),
        Option("folder", str, "folder of the runs", default="runs", metavar="FOLDER"),
        Option("plain", bool, "also run plain torch", default=True),
    ),
    keys=EVERY_KEY,
)
COLUMNS = ("tokens_per_second", "mfu", "mfu_causal", "memory_gib", "first_step_s")


def folder_of(name: str, options: dict[str, Any], accumulation: int) -> Path:
    return Path(options["folder"]) / f"benchmark_{name.replace('/', '_')}_{accumulation}"


def run_stack(name: str, options: dict[str, Any], accumulation: int, steps: int, extra: list[str]) -> dict[str, float]:
    """Runs the stack once. Returns medians by column, or {} if the run failed, whose output is then printed.

    name: a run file, and perhaps keys of its own (NAME+KEY=VALUE).
    """
    config, *own = name.split("+")
    folder = folder_of(name, options, accumulation)
    shutil.rmtree(folder, ignore_errors=True)
    microbatch = options["microbatch"]
    keys = {
        "config": config,
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
    stages = len(load_config([f"config={config}"]).train.stages)
    keys |= {f"train.stages.{stage}.mix": "null" for stage in range(stages)}
    arguments = [f"{key}={value}" for key, value in keys.items()] + extra + own
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
    settled = records[-options["last"] :] if options["last"] else records[4:] or records
    result = {key: statistics.median(record[key] for record in settled) for key in COLUMNS[:-1] if key in settled[0]}
    return result | {"first_step_s": float(first[0].split()[3])}


def run_plain(name: str, microbatch: int, accumulation: int, steps: int) -> dict[str, float]:
    command = [
        sys.executable,
        "-m",
        "eval.benchmarks.plain_torch",
        name,
        str(microbatch),
        str(accumulation),
        str(steps),
    ]
    process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if process.returncode:
        print(process.stderr[-3000:], flush=True)
        return {}
    return json.loads(process.stdout.splitlines()[-1])


def main(argv: list[str]) -> None:
    from eval.checkpoint.command import whole_numbers

    options, extra = COMMAND.parse(argv)
    accumulations, steps = (whole_numbers(options[key], key) for key in ("accumulation", "steps"))
    for name in options["configs"].split(","):
        config, *own = name.split("+")
        load_config([f"config={config}", *extra, *own], options=COMMAND.names)
    if not Path(options["data"]).is_dir():
        raise UserError(f"data={options['data']}: there is no such folder")
    rows, plain = [], {}
    for name in options["configs"].split(","):
        shape = name.split("_")[0]
        for accumulation, count in zip(accumulations, steps):
            if (shape, accumulation) not in plain and options["plain"]:
                arguments = (options["microbatch"], accumulation, min(count, 15))
                plain[shape, accumulation] = run_plain(name.split("+")[0], *arguments)
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
    run(COMMAND, main)
