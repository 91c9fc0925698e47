"""Benchmark of parallel layouts on the GPUs of one machine, in runs of launch/pretrain.py on real text.

part=losses   the losses of each layout next to those of data parallelism and of other orders of summation
part=speed    tokens/s, peak and estimated memory of each layout, with rows / data-parallel ranks per microbatch
part=long     the same for the layouts with context parallelism only; use it with data of long rows
part=weak     tokens/s per GPU on one GPU and on all, with ZeRO-1, accumulation 1 and rows / gpus on each GPU
part=tensor   data parallelism, and tensor parallelism with blocks in pieces, whole, and with the options of its exchanges
part=zero     the ZeRO stages, and stage 3 without compiled blocks
part=exchange as part=weak, also on the last GPU alone, which may be slower than the first; by NVLink, through host memory
              and through sockets, with parallel.overlap off, on, in bf16, and by NVLink with parallel.copy_engines
part=skip     a ring of all GPUs with skip_below as configured and with 0; give init_from=RUN of a trained model

Figures are medians over the records after the fourth, of one step each (train.log_every=1). Each run prints a line when it
ends and writes its output to FOLDER.
"""

import itertools
import os
import shutil
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from launch.boot import EVERY_KEY, ROOT, Command, Option, run
from ssscale.config import load_config
from ssscale.config.registry import MIXERS
from ssscale.errors import UserError
from ssscale.options import last_of_each
from ssscale.train.early import check_data
from ssscale.train.estimate import memory_per_gpu
from ssscale.train.records import read_metrics

GIB = 2**30
OUTSIDE = 3  # GiB per process outside the estimate: CUDA context, NCCL buffers, fragmentation
PARTS = ("losses", "speed", "long", "weak", "exchange", "tensor", "zero", "skip")
PER_GPU = ("weak", "exchange")  # parts in which a run on one GPU has as many rows per GPU as the others
# NCCL's transports, which stand in for networks.
TRANSPORTS = {
    "by NVLink": (),
    "through host memory": (("NCCL_P2P_DISABLE", "1"),),
    "through sockets": (("NCCL_P2P_DISABLE", "1"), ("NCCL_SHM_DISABLE", "1")),
}
COMMAND = Command(
    about=__doc__,
    usage="python launch/benchmark_parallel.py part=PART gpus=N data=FOLDER [key=value ...]",
    example="python launch/benchmark_parallel.py part=speed gpus=4 data=data/pretrain config=1b_ssmax",
    options=(
        Option("part", str, "what to measure", required=True, choices=PARTS),
        Option("gpus", int, "GPUs of the largest layout", required=True, at_least=1),
        Option("data", str, "a packed data folder", required=True, metavar="FOLDER"),
        Option("config", str, "the run file", default="1b_ssmax", metavar="NAME"),
        Option("rows", int, "rows per step (4 per GPU)", at_least=1),
        Option("steps", int, "steps of each run", default=50, at_least=1),
        Option("folder", str, "folder of the runs and their output", default="runs", metavar="FOLDER"),
        Option("only", str, 'some of the layouts, such as "ring 4,TP4"', metavar="LAYOUT,..."),
        Option("at_once", int, "runs at the same time on the same GPUs, if they fit; for part=losses only", default=1),
    ),
    keys=EVERY_KEY,
)


class Run(NamedTuple):
    label: str
    gpus: int
    tensor: int = 1
    ulysses: int = 1
    ring: int = 1
    keys: tuple[str, ...] = ()
    microbatches: int = 1
    environment: tuple[tuple[str, str], ...] = ()


class Found(NamedTuple):
    losses: list[float]
    gradient_norm: float  # of the first step; nan if DeepSpeed reports none
    tokens_per_second: float
    memory_gib: float  # of rank 0; nan on CPUs
    estimate_gib: float


def layouts(gpus: int) -> list[Run]:
    """Returns the layouts: data parallelism, then groups of each kind over all GPUs or half of them."""
    half = gpus // 2
    found = [Run(f"DP{gpus}", gpus)]
    if half > 1:
        found.append(Run(f"TP2 x DP{half}", gpus, tensor=2))
    found += [Run(f"TP{gpus}", gpus, tensor=gpus), Run(f"ring {gpus}", gpus, ring=gpus)]
    found.append(Run(f"Ulysses {gpus}", gpus, ulysses=gpus))
    if half > 1:
        found += [Run(f"ring 2 x TP{half}", gpus, tensor=half, ring=2), Run("ulysses 2 x ring 2", gpus, 1, 2, half)]
    return found


MICROBATCHES = {1: "", 2: " in two microbatches", 4: " in four microbatches"}


def runs_of(part: str, gpus: int, rows: int) -> list[Run]:
    """Returns the runs of a part. rows: rows per step, which limit the number of microbatches of part=losses."""
    every = layouts(gpus)
    if part == "losses":
        # The orders differ in the sums over rows (microbatches), in the sums and rounding within a block (compilation),
        # and in the sums over ranks (trees). NCCL can gather only in rings, so trees are set for allreduce alone. Two
        # ranks have one order.
        tree = (("NCCL_ALGO", "allreduce:tree"),)
        orders = [
            every[0]._replace(
                label=every[0].label + said + " in compiled blocks" * compiled + " reduced as a tree" * trees,
                microbatches=microbatches,
                keys=("train.compile=block",) * compiled,
                environment=tree * trees,
            )
            for trees, compiled, (microbatches, said) in itertools.product(
                (False, True), (False, True), MICROBATCHES.items()
            )
            if (gpus > 2 or not trees) and (microbatches == 1 or rows % (gpus * microbatches) == 0)
        ]
        return [*orders, *every[1:]]
    if part == "long":
        return [layout for layout in every if layout.ulysses * layout.ring == gpus]
    if part == "weak":
        return [Run("DP1", 1), every[0]]
    if part == "tensor":
        return [every[0], *tensor_ways(gpus)]
    if part == "zero":
        stages = [every[0]._replace(label=f"ZeRO-{i}", keys=(f"parallel.zero_stage={i}",)) for i in (1, 2, 3)]
        plain = (*stages[-1].keys, "train.compile=none")
        return [*stages, stages[-1]._replace(label="ZeRO-3 not compiled", keys=plain)]
    if part == "exchange":
        return exchanges(gpus)
    if part == "skip":
        ring = Run(f"ring {gpus}", gpus, ring=gpus)
        exact = [(name, *option) for name, mixer in MIXERS.items() for option in mixer.exact.items()]
        keys = tuple(f"model.mixer.{name}.{option}={value}" for name, option, value in exact)
        said = ", ".join(f"{option}={value}" for _, option, value in exact)
        return [ring, ring._replace(label=f"ring {gpus} with {said}", keys=keys)]
    return every


def tensor_ways(gpus: int) -> list[Run]:
    """Returns tensor parallelism over all GPUs in each way; `auto` chooses the last one for rows of one document."""
    gathered, copied = "parallel.keep_gathered=false", "parallel.copy_engines=false"
    ways: dict[str, tuple[str, ...]] = {
        "": ("train.compile_exchanges=false",),
        " whole": (gathered, copied),
        " whole keep_gathered": (copied,),
        " whole overlap_gathers": (gathered, copied, "parallel.overlap_gathers=true"),
        " whole keep_gathered overlap_gathers": (copied, "parallel.overlap_gathers=true"),
        " whole keep_gathered copy_engines": ("train.cuda_graphs=false",),
        " whole keep_gathered copy_engines cuda_graphs": ("train.cuda_graphs=true",),
    }
    return [Run(f"TP{gpus}{way}", gpus, tensor=gpus, keys=keys) for way, keys in ways.items()]


def exchanges(gpus: int) -> list[Run]:
    """Returns the first and the last GPU alone, and data parallelism over each transport in each way."""
    overlap = ("parallel.overlap=true",)
    ways: dict[str, tuple[str, ...]] = {
        "": (),
        " overlap": overlap,
        " overlap in bf16": (*overlap, "parallel.overlap_bf16=true"),
        " overlap copy_engines": (*overlap, "parallel.copy_engines=true"),
    }
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    name = visible[gpus - 1] if len(visible) >= gpus else str(gpus - 1)
    last = Run("DP1 on the last GPU", 1, environment=(("CUDA_VISIBLE_DEVICES", name),))
    return [
        Run("DP1", 1),
        last,
        *(
            Run(f"DP{gpus}{way} {transport}", gpus, keys=keys, environment=network)
            for (transport, network), (way, keys) in itertools.product(TRANSPORTS.items(), ways.items())
            if "copy_engines" not in way or not network  # which use no transport of NCCL
        ),
    ]


def chosen(part: str, gpus: int, rows: int, only: str | None) -> list[Run]:
    """Returns the runs of a part, restricted to `only` if given. Raises UserError for an unknown name."""
    runs = runs_of(part, gpus, rows)
    if only is None:
        return runs
    names = [name.strip() for name in only.split(",")]
    known = {layout.label: layout for layout in runs}
    for name in names:
        if name not in known:
            raise UserError(f"only: there is no {name!r} in part={part} on {gpus} GPUs: use {', '.join(known)}")
    return [known[name] for name in names]


def arguments_of(layout: Run, options: dict[str, Any], extra: list[str]) -> list[str]:
    """Returns the arguments of a run except its folder."""
    name, rows = options["config"], options["rows"]
    if options["part"] in PER_GPU:
        rows = rows // options["gpus"] * layout.gpus
    data_ranks = layout.gpus // (layout.tensor * layout.ulysses * layout.ring)
    keys: dict[str, Any] = {
        "config": name,
        "data.path": options["data"],
        "parallel.tensor": layout.tensor,
        "parallel.ulysses": layout.ulysses,
        "parallel.ring": layout.ring,
        "train.microbatch": rows // data_ranks // layout.microbatches,
        "train.batch_size": rows,
        "train.max_steps": options["steps"],
        "train.log_every": 1,
        "train.eval_every": 0,
        "train.save_every": 0,
        "train.keep_best": "false",
        "train.observe_every": 0,
    }
    stages = len(load_config([f"config={name}"]).train.stages)
    keys |= {f"train.stages.{stage}.mix": "null" for stage in range(stages)}
    return last_of_each([*(f"{key}={value}" for key, value in keys.items()), *extra, *layout.keys])


def estimated_gib(layout: Run, options: dict[str, Any], extra: list[str]) -> float:
    return memory_per_gpu(load_config(arguments_of(layout, options, extra)), layout.gpus).total / GIB


def check_room(estimates: list[float], at_once: int, room: float) -> None:
    """Raises UserError if the `at_once` largest runs do not fit together on a GPU of `room` GiB."""
    needed = list(itertools.accumulate(sorted((gib + OUTSIDE for gib in estimates), reverse=True)[:at_once]))
    if needed[-1] > room:
        fit = max(1, sum(gib <= room for gib in needed))
        raise UserError(
            f"at_once={at_once}: by their estimates, and {OUTSIDE} GiB each for CUDA and NCCL, these runs need "
            f"{needed[-1]:.0f} GiB of a GPU's {room:.0f}: use at_once={fit}"
        )


def log_of(layout: Run, options: dict[str, Any]) -> Path:
    """Returns the file for the output of a run."""
    return Path(options["folder"]) / f"{options['part']}_{slug(layout, options)}.log"


def slug(layout: Run, options: dict[str, Any]) -> str:
    """Returns the end of the names of a run's files."""
    return f"{options['config'].replace('/', '_')}_{layout.label.replace(' ', '_')}"


def execute(layout: Run, options: dict[str, Any], extra: list[str]) -> Found | None:
    folder, log = Path(options["folder"]) / f"parallel_{slug(layout, options)}", log_of(layout, options)
    shutil.rmtree(folder, ignore_errors=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    arguments = arguments_of(layout, options, extra)
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc_per_node={layout.gpus}",
        str(ROOT / "launch/pretrain.py"),
    ]
    began = time.perf_counter()
    process = subprocess.run(
        [*command, *arguments, f"run_dir={folder}"],  # in the folder from which the paths in the options lead
        env=os.environ | dict(layout.environment),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    # The watchdog writes its stacks to the run folder, which the next run removes.
    output = process.stdout + "".join(file.read_text() for file in sorted(folder.glob("stacks/*.txt")))
    log.write_text(output)
    print(f"# {layout.label}: {time.perf_counter() - began:.0f} s, exit {process.returncode}, {log}", flush=True)
    if process.returncode:
        starts = [output.find(word) for word in ("error: ", "stopped: ", "Traceback")]
        first = min((start for start in starts if start >= 0), default=0)  # not the launcher's own, which comes last
        print(output[first:][:4000], flush=True)
        return None
    records = [record for record in read_metrics(folder / "metrics.jsonl") if "loss" in record]
    settled = records[4:] or records
    return Found(
        [record["loss"] for record in records],
        records[0].get("grad_norm", float("nan")),
        statistics.median(record["tokens_per_second"] for record in settled),
        max(record.get("memory_gib", float("nan")) for record in settled),
        estimated_gib(layout, options, extra),
    )


LOSSES = "| layout | first loss | last loss | largest difference | mean difference |\n|---|---|---|---|---|"
SPEED = """\
| layout | tokens/s | a GPU | of the first | peak GiB | estimate GiB | first gradient norm |
|---|---|---|---|---|---|---|"""
ALIKE = 0.02  # relative difference of losses and gradient norms that bf16 explains


def losses_row(label: str, result: Found, first: Found) -> str:
    differences = [abs(a - b) for a, b in zip(result.losses, first.losses, strict=True)]
    ends = f"{result.losses[0]:.5f} | {result.losses[-1]:.5f}"
    return f"| {label} | {ends} | {max(differences):.2e} | {statistics.mean(differences):.2e} |"


def spreads(found: dict[Run, Found], first: Run) -> str:
    """Describes the differences between all orders of summation of one layout, and between all layouts."""
    orders = [layout for layout in found if layout.label.startswith(first.label)]
    layouts = [layout for layout in found if layout == first or layout not in orders]
    lines = []
    for name, some in (("orders of summation of one layout", orders), ("layouts", layouts)):
        pairs = list(itertools.combinations(some, 2))
        apart = [[abs(a - b) for a, b in zip(found[x].losses, found[y].losses, strict=True)] for x, y in pairs]
        if apart:
            most, middle = max(map(max, apart)), statistics.median(map(max, apart))
            mean = statistics.mean(map(statistics.mean, apart))
            lines.append(
                f"{len(some)} {name}: largest difference of any two {most:.2e} (median of the {len(pairs)} pairs' "
                f"{middle:.2e}), mean {mean:.2e}"
            )
    return "\n".join(lines)


def speed_row(layout: Run, result: Found, first: float) -> str:
    """Returns a row of the table. first: tokens/s per GPU of the first run."""
    each = result.tokens_per_second / layout.gpus
    cells = f"{result.tokens_per_second:,.0f} | {each:,.0f} | {each / first:.3f} | {result.memory_gib:.1f}"
    return f"| {layout.label} | {cells} | {result.estimate_gib:.1f} | {result.gradient_norm:.4g} |"


def warning(layout: Run, result: Found, first: Found) -> str | None:
    """Returns a warning if the first step's loss or gradient norm shows that a layout computes something else."""
    losses, norms = (result.losses[0], first.losses[0]), (result.gradient_norm, first.gradient_norm)
    for what, (here, there) in (("loss", losses), ("gradient norm", norms)):
        if abs(here - there) > ALIKE * abs(there):
            beside = f"{here:.4g}, the first layout's {there:.4g}"
            return f"# {layout.label}: the first step's {what} is {beside}: not one computation"
    return None


def check_finished(every: dict[Run, Found], runs: list[Run], options: dict[str, Any]) -> None:
    """Raises UserError if a run failed."""
    failed = [f"{layout.label} ({log_of(layout, options)})" for layout in runs if layout not in every]
    if failed:
        count = "no run finished" if not every else f"{len(failed)} of {len(runs)} runs failed"
        raise UserError(f"{count}; their output is in the files: {', '.join(failed)}")


def main(argv: list[str]) -> None:
    options, extra = COMMAND.parse(argv)
    options = {"rows": 4 * options["gpus"]} | options
    if options["at_once"] != 1 and (options["part"] != "losses" or options["at_once"] < 1):
        raise UserError(
            f"at_once={options['at_once']}: runs beside each other have part=losses alone, one or more of them"
        )
    runs = chosen(options["part"], options["gpus"], options["rows"], options.get("only"))
    check_data(load_config(arguments_of(runs[0], options, extra), options=COMMAND.names))
    print(f"{options['config']}, {options['rows']} rows per step, {options['steps']} steps")
    print(LOSSES if options["part"] == "losses" else SPEED, flush=True)
    base: tuple[Found, float] | None = None  # the first run that finished, and its tokens/s per GPU
    if options["at_once"] > 1:
        import torch  # importing torch takes seconds

        estimates = [estimated_gib(layout, options, extra) for layout in runs]
        if torch.cuda.is_available():
            check_room(estimates, options["at_once"], torch.cuda.get_device_properties(0).total_memory / GIB)
    measure = partial(execute, options=options, extra=extra)
    with ThreadPoolExecutor(options["at_once"]) as pool:
        results = map(measure, runs) if options["at_once"] == 1 else pool.map(measure, runs)
        every: dict[Run, Found] = {}
        for layout, found in zip(runs, results, strict=True):
            if found is None:
                continue
            every[layout] = found
            base = base or (found, found.tokens_per_second / layout.gpus)
            losses = options["part"] == "losses"
            row = losses_row(layout.label, found, base[0]) if losses else speed_row(layout, found, base[1])
            print(row, flush=True)
            if options["part"] not in PER_GPU and (said := warning(layout, found, base[0])):
                print(said, flush=True)
    if options["part"] == "losses" and len(every) > 1:
        print(spreads(every, next(iter(every))))
    check_finished(every, runs, options)


if __name__ == "__main__":
    run(COMMAND, main)
