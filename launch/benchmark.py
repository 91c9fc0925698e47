"""Benchmark of the stack's training step against plain torch and the papers, in one run on the GPUs of one machine.

Each row of the table is a run of launch/pretrain.py (real data, streaming, Megatron layers, DeepSpeed, metrics) or of
eval/benchmarks/plain_torch.py, which takes one GPU. Ratios are to plain torch with the same accumulation. Figures are
medians over the steps after the first four, or over the last ones. Runs of 50 steps or more log every tenth, as run files
do, so theirs are over the steps after the first ten. tokens/s are those of one GPU. Billions of tokens per day are for 8
GPUs at that rate, as a paper states its own. A run file may have keys of its own, to compare runs:
configs=NAME,NAME+KEY=VALUE+KEY=VALUE.
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
from ssscale.options import last_of_each
from ssscale.train.early import check_data
from ssscale.train.records import read_metrics

COMMAND = Command(
    about=__doc__,
    usage="python launch/benchmark.py configs=NAME,... data=FOLDER [key=value ...]",
    example="python launch/benchmark.py configs=1b_softmax,1b_ssmax data=data/pretrain accumulation=1,16 steps=100,8",
    options=(
        Option(
            "configs",
            str,
            "run files, each with keys of its own if wanted",
            metavar="NAME[+KEY=VALUE...],...",
            required=True,
        ),
        Option("data", str, "a packed data folder", metavar="FOLDER", required=True),
        Option("microbatch", int, "rows per microbatch", default=4, at_least=1),
        Option("accumulation", str, "microbatches per step, one run each", default="1,16", metavar="N,..."),
        Option("steps", str, "steps of each of these runs, or one number for all", default="100,8", metavar="N,..."),
        Option("last", int, "last steps that medians are over; 0: all after the first four", default=0, at_least=0),
        Option("folder", str, "folder of the runs", default="runs", metavar="FOLDER"),
        Option("plain", bool, "also run plain torch (true with one GPU)"),
        Option("gpus", int, "GPUs, one process each", default=1, at_least=1),
        Option(
            "backend",
            str,
            "kernels of mixers that have a choice, one run each: auto, cudnn, flash (FlashAttention-2)",
            default="auto",
            metavar="NAME,...",
        ),
        Option("out", str, "a JSON file for the results", metavar="FILE"),
        Option("masters", bool, "also run plain torch with fp32 master weights and clipping", default=False),
    ),
    keys=EVERY_KEY,
)
LONG, LOG_EVERY = 50, 10  # runs of so many steps log as the run files do
SIZES = ("model.", "data.length=")  # keys that plain torch takes as well
BACKENDS = ("auto", "cudnn", "flash")
DAY, NODE = 86_400, 8  # seconds; the GPUs of the papers' throughput
COLUMNS = ("tokens_per_second", "mfu", "mfu_causal", "memory_gib", "first_step_s")


def folder_of(name: str, options: dict[str, Any], accumulation: int) -> Path:
    return Path(options["folder"]) / f"benchmark_{name.replace('/', '_')}_{accumulation}"


def log_of(name: str, options: dict[str, Any], accumulation: int, kernel: str) -> Path:
    """Returns the file for the output of a run that failed. kernel: its label in the table."""
    folder = folder_of(name, options, accumulation)
    return folder.with_name(f"{folder.name}_{kernel}.log")


def keep_output(process: subprocess.CompletedProcess[str], log: Path) -> None:
    """Prints the end of what a failed run wrote, and writes all of it to a file."""
    output = process.stdout + process.stderr
    print(output[-6000:], flush=True)
    log.parent.mkdir(parents=True, exist_ok=True)
    log.write_text(output, encoding="utf-8")


def run_stack(
    name: str, options: dict[str, Any], accumulation: int, steps: int, extra: list[str], kernel: str = "own"
) -> dict[str, float]:
    """Runs the stack once. Returns medians by column, or {} if the run failed, whose output is then in `log_of`.

    name: a run file, and perhaps keys of its own (NAME+KEY=VALUE). Raises UserError if the run left no records.
    """
    config, *own = name.split("+")
    folder = folder_of(name, options, accumulation)
    shutil.rmtree(folder, ignore_errors=True)
    microbatch, log_every = (
        options["microbatch"],
        LOG_EVERY if steps >= LONG else 1,
    )  # a record takes the host milliseconds
    keys = {
        "config": config,
        "run_dir": folder,
        "data.path": options["data"],
        "data.one_document": "true",
        "train.microbatch": microbatch,
        "train.batch_size": microbatch * accumulation * options.get("gpus", 1),
        "train.max_steps": steps,
        "train.log_every": log_every,
        "train.eval_every": 0,
        "train.save_every": 0,
        "train.keep_best": "false",
    }
    stages = len(load_config([f"config={config}"]).train.stages)
    keys |= {f"train.stages.{stage}.mix": "null" for stage in range(stages)}
    arguments = last_of_each([*(f"{key}={value}" for key, value in keys.items()), *extra, *own])
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]  # on a free port
    # It runs in the folder of the caller, from which relative paths lead.
    command = [*launcher, f"--nproc_per_node={options.get('gpus', 1)}", str(ROOT / "launch/pretrain.py"), *arguments]
    began = time.perf_counter()
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    print(f"# {name} x{accumulation}: {time.perf_counter() - began:.0f} s, exit {process.returncode}", flush=True)
    if process.returncode:
        keep_output(process, log_of(name, options, accumulation, kernel))
        return {}
    first = [line for line in process.stderr.splitlines() if line.startswith("first step after")]
    records = [record for record in read_metrics(folder / "metrics.jsonl") if "loss" in record]
    if not records:
        raise UserError(
            f"{folder} has no record of a step in its metrics.jsonl: train.log_every must be at most {steps}"
        )
    print(f"# loss {records[0]['loss']:.3f} -> {records[-1]['loss']:.3f} in {len(records)} steps", flush=True)
    dropped = 4 if log_every == 1 else 1
    settled = records[-max(1, options["last"] // log_every) :] if options["last"] else records[dropped:] or records
    result = {key: statistics.median(record[key] for record in settled) for key in COLUMNS[:-1] if key in settled[0]}
    return result | {"first_step_s": float(first[0].split()[3])}


def run_plain(
    name: str, microbatch: int, accumulation: int, steps: int, keys: list[str], log: Path, masters: bool = False
) -> dict[str, float]:
    """Runs plain torch once. Returns its result, or {} if the run failed, whose output is then in `log`."""
    command = [
        sys.executable,
        "-m",
        "eval.benchmarks.plain_torch",
        str(Path(name).resolve()) if name.endswith(".yaml") else name,
        str(microbatch),
        str(accumulation),
        str(steps),
        *(["masters"] if masters else []),
        *keys,
    ]
    process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if process.returncode:
        keep_output(process, log)
        return {}
    return json.loads(process.stdout.splitlines()[-1])


def kernels_of(name: str, backends: list[str]) -> list[tuple[str, list[str]]]:
    """Returns (label, keys) of each run of a run file: one per backend if its mixers have a choice, else one."""
    config, *own = name.split("+")
    mixers = load_config([f"config={config}", *own]).model.used
    chosen = [mixer for mixer, config in mixers.items() if hasattr(config, "backend")]
    if not chosen:
        return [("own", [])]
    return [(backend, [f"model.mixer.{mixer}.backend={backend}" for mixer in chosen]) for backend in backends]


def checked(options: dict[str, Any], extra: list[str]) -> tuple[list[str], list[tuple[int, int]]]:
    """Returns the backends to run, and (accumulation, steps) of each run. Raises UserError for mistakes in the options."""
    backends = [name.strip() for name in options["backend"].split(",")]
    if unknown := [name for name in backends if name not in BACKENDS]:
        raise UserError(f"backend={unknown[0]}: use {', '.join(BACKENDS)}")
    if options.get("plain") and options["gpus"] > 1:
        raise UserError("plain=true: plain torch takes one GPU; set gpus=1")
    if options["masters"] and not options.get("plain", options["gpus"] == 1):
        left_out = "plain=false" if "plain" in options else f"gpus={options['gpus']}, where plain torch takes one"
        raise UserError(f"masters=true runs plain torch once more, but it does not run with {left_out}")
    sizes = paired(options)
    for name in options["configs"].split(","):
        config, *own = name.split("+")
        found = load_config([f"config={config}", f"data.path={options['data']}", *extra, *own], options=COMMAND.names)
        if "://" not in options["data"] and not Path(options["data"]).is_dir():
            raise UserError(f"data={options['data']}: there is no such folder")
        check_data(found)
    return backends, sizes


def paired(options: dict[str, Any]) -> list[tuple[int, int]]:
    """Returns (accumulation, steps) of each run. Raises UserError if the two options do not fit each other."""
    from eval.checkpoint.command import whole_numbers

    accumulations, steps = (whole_numbers(options[key], key) for key in ("accumulation", "steps"))
    if len(steps) == 1:
        steps *= len(accumulations)
    if len(steps) != len(accumulations):
        raise UserError(
            f"accumulation={options['accumulation']} and steps={options['steps']} differ in length: give the steps of each "
            "accumulation, or one number of steps for all"
        )
    return list(zip(accumulations, steps, strict=True))


def row(
    label: str, kernel: str, accumulation: int, found: dict[str, float], gpus: int, of_plain: float
) -> dict[str, Any]:
    """Returns a result. Rates are those of one GPU; billions of tokens per day are of eight."""
    from eval.benchmarks.published import PUBLISHED

    rate = found.get("tokens_per_second", float("nan")) / gpus
    about = {"run": label, "kernel": kernel, "accumulation": accumulation, "gpus": gpus}
    billions = {"tokens_per_second_per_gpu": rate, "billion_tokens_per_day": rate * NODE * DAY / 1e9}
    return about | billions | {"published": PUBLISHED.get(label), "of_plain": of_plain} | found


def show(rows: list[dict[str, Any]]) -> None:
    """Prints the table."""
    print("| run | kernel | accumulation | tokens/s per GPU | billion tokens/day, 8 GPUs | the paper's | of plain torch | "
          "MFU | MFU causal half | peak GiB | first step s |")  # fmt: skip
    print("|---|---|---|---|---|---|---|---|---|---|---|")
    for found in rows:
        mfu, half, memory, first = (found.get(key, float("nan")) for key in COLUMNS[1:])
        rates = f"{found['tokens_per_second_per_gpu']:,.0f} | {found['billion_tokens_per_day']:.2f}"
        theirs = "–" if found["published"] is None else f"{found['published']:.2f}"
        cells = f"{rates} | {theirs} | {found['of_plain']:.3f} | {mfu:.3f} | {half:.3f} | {memory:.1f} | {first:.0f}"
        print(f"| {found['run']} | {found['kernel']} | {found['accumulation']} | {cells} |", flush=True)


def run_peers(
    name: str, accumulation: int, steps: int, options: dict[str, Any], extra: list[str]
) -> list[dict[str, Any]]:
    """Returns the rows of plain torch, the first of which the ratios are to. Of `extra` it takes the sizes of the model."""
    keys = [key for key in extra if key.startswith(SIZES)]
    shape, arguments = name.split("_")[0], (options["microbatch"], accumulation, min(steps, 15))
    config = name.split("+")[0]
    log = log_of(config, options, accumulation, "plain")
    found = run_plain(config, *arguments, keys, log)
    rows = [row(f"plain torch {shape}", "cudnn", accumulation, found, 1, 1.0) | failure(found, log)]
    if options["masters"]:
        log = log_of(config, options, accumulation, "masters")
        masters = run_plain(config, *arguments, keys, log, masters=True)
        label = f"plain torch {shape}, fp32 masters, clipping"
        rows.append(row(label, "cudnn", accumulation, masters, 1, ratio(masters, found)) | failure(masters, log))
    return rows


def failure(found: dict[str, float], log: Path) -> dict[str, str]:
    """Returns the entry that marks the row of a failed run."""
    return {} if found else {"failed": str(log)}


def check_finished(rows: list[dict[str, Any]]) -> None:
    """Raises UserError if a run failed."""
    failed = [f"{found['run']} x{found['accumulation']} ({found['failed']})" for found in rows if "failed" in found]
    if failed:
        raise UserError(f"{len(failed)} of {len(rows)} runs failed; their output is in the files: {', '.join(failed)}")


def ratio(found: dict[str, float], peer: dict[str, float]) -> float:
    return found["tokens_per_second"] / peer["tokens_per_second"] if found and peer else float("nan")


def main(argv: list[str]) -> None:
    from eval.checkpoint.command import write

    options, extra = COMMAND.parse(argv)
    (backends, sizes), gpus = checked(options, extra), options["gpus"]
    rows: list[dict[str, Any]] = []
    plain: dict[tuple[str, int], dict[str, float]] = {}
    for name in options["configs"].split(","):
        shape = name.split("_")[0]
        for accumulation, count in sizes:
            if (shape, accumulation) not in plain and options.get("plain", gpus == 1):
                peers = run_peers(name, accumulation, count, options, extra)
                plain[shape, accumulation] = peers[0] if "tokens_per_second" in peers[0] else {}
                rows += peers
            peer = plain.get((shape, accumulation), {})
            for kernel, keys in kernels_of(name, backends):
                result = run_stack(name, options, accumulation, count, [*keys, *extra], kernel)
                log = log_of(name, options, accumulation, kernel)
                rows.append(row(name, kernel, accumulation, result, gpus, ratio(result, peer)) | failure(result, log))
                if "out" in options:
                    write(Path(options["out"]), {"rows": rows}, indent=1)
    show([found for found in rows if "failed" not in found])
    check_finished(rows)


if __name__ == "__main__":
    run(COMMAND, main)
