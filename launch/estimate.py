"""Estimate what a run costs before it starts.

Prints parameters, FLOPs per token, memory per GPU by part, tokens per day and days to the token budget. Needs no GPU.

Without nodes=, gpus= is the number of all GPUs, and the speed follows from the assumed mfu=. With nodes=, gpus= is the
number of GPUs on each node, and a model of the step predicts the speed of the layout as configured and of the fastest
layouts that fit: tokens/s, and the seconds per step of exchanges that nothing hides. The microbatch of the fastest ones is
the best that divides the batch. docs/results/predicted_scaling.md says what the model is worth.
"""

from dataclasses import replace
from typing import Any

from rich.box import ASCII
from rich.console import Console
from rich.table import Table

from launch.boot import EVERY_KEY, Command, Option, run
from ssscale.config import load_config
from ssscale.config.choices import Compile, Fp8, Recompute, ShardWithin
from ssscale.config.schema import Config
from ssscale.errors import UserError
from ssscale.model.flops import PEAK_FLOPS
from ssscale.train.estimate import Estimate, estimate, fp8_speedup
from ssscale.train.links import Cluster
from ssscale.train.microbatch import H100_MEMORY, fits, with_microbatch
from ssscale.train.scale import (
    UNMEASURED,
    Prediction,
    check_cluster,
    forward_mfu,
    layouts,
    other_shards,
    predict,
)
from ssscale.validate import validate

GIB = 2**30
GPUS = 8  # if gpus= is not given
MFU = 0.4  # assumed where nothing is predicted
NETWORK = 50.0  # GB/s per GPU: one 400 Gbit/s port
SHOWN, WIDTH = 6, 120  # predicted layouts, and columns of their table

COMMAND = Command(
    about=__doc__,
    usage="python launch/estimate.py config=NAME [gpus=N] [mfu=X] [nodes=N] [network=X] [gpu_memory=GIB] [key=value ...]",
    example="python launch/estimate.py config=3b_sb nodes=64 gpus=8 network=50",
    options=(
        Option("gpus", int, f"GPUs of the run; with nodes=, GPUs per node ({GPUS})", at_least=1),
        Option(
            "mfu",
            float,
            f"share of the GPUs' bf16 peak (without nodes= {MFU:g}; with nodes= that of forward and backward on one GPU, as "
            "measured)",
            above=0,
            at_most=1,
        ),
        Option("nodes", int, "nodes of gpus= GPUs each; predicts the speed", at_least=1),
        Option("network", float, "GB/s per GPU to other nodes and from them; only with nodes= (50)", above=0),
        Option(
            "gpu_memory",
            float,
            "GiB per GPU, for train.microbatch=auto; 79 is an 80 GB H100",
            default=H100_MEMORY / 2**30,
            above=0,
        ),
    ),
    keys=EVERY_KEY,
)


def main(argv: list[str]) -> None:
    options, arguments = COMMAND.parse(argv)
    config = load_config(arguments, options=COMMAND.names)
    if "nodes" in options:
        scale(config, options)
        return
    if config.parallel.shard_within is ShardWithin.node:
        raise UserError(
            "parallel.shard_within=node needs nodes=, the number of nodes; gpus= are then those of each node"
        )
    if "network" in options:
        raise UserError("network= needs nodes=, the number of nodes that it connects")
    gpus, mfu, memory = options.get("gpus", GPUS), options.get("mfu", MFU), options["gpu_memory"] * GIB
    validate(config, gpu=True)
    try:
        validate(config, world_size=gpus, gpu=True)
    except UserError as error:
        raise UserError(f"{error}" + ("" if "gpus" in options else f" (gpus={GPUS} is the default)")) from error
    config = with_microbatch(config, config.train.batch_size, gpus, memory)
    show(config, gpus, mfu, estimate(config, gpus, mfu))
    if not fits(config, gpus, memory):
        print(f"This does not fit a GPU of {memory / GIB:g} GiB (gpu_memory=).")


def scale(config: Config, options: dict[str, Any]) -> None:
    """Shows the fastest layout like `show`, and the predictions of several layouts. Raises UserError if none fits."""
    validate(config, gpu=True)
    network = options.get("network", NETWORK)
    cluster = Cluster(options["nodes"], options.get("gpus", GPUS), network * 1e9, options["gpu_memory"] * GIB)
    mfu = options.get("mfu")
    found = layouts(config, cluster, mfu)
    if not found:
        raise UserError(why_none(config, cluster))
    rows = [("", prediction) for prediction in found[:SHOWN]]
    compared: list[tuple[str, Prediction]] = []
    try:
        validate(config, world_size=cluster.size, gpu=True)
        check_cluster(config, cluster)
        given = with_microbatch(config, config.train.batch_size, cluster.size, cluster.memory, cluster.gpus)
        compared.append(("as configured", predict(given, cluster, mfu)))
        other = other_shards(given, cluster)
        if other is not None:
            compared.append((f"shard_within={other.parallel.shard_within}", predict(other, cluster, mfu)))
        refused = ""
    except UserError as error:
        refused = f"As configured it cannot run: {error}."
    best = found[0]
    reached = best.tokens_per_second * estimate(best.config, cluster.size, 1.0).flops_per_token / PEAK_FLOPS
    share = reached / cluster.size / fp8_speedup(best.config)  # `estimate` applies it
    show(best.config, cluster.size, share, estimate(best.config, cluster.size, share, per_node=cluster.gpus))
    console = Console(width=WIDTH, markup=False, emoji=False)
    console.print(predictions([*compared, *rows], cluster))
    for label, row in compared if len(compared) > 1 else ():
        sent = (
            f"{row.traffic.within / 1e9:.2f} GB within its node and {row.traffic.between / 1e9:.2f} GB to other nodes"
        )
        console.print(f"{label}: per step, each GPU sends {sent} of gradients and weights.", highlight=False)
    exposed = ", ".join(f"{name} {seconds:.3f} s" for name, seconds in best.exposed.items())
    for line in filter(None, (refused, f"Exposed in the fastest: {exposed or 'nothing'}.", origin(config, mfu))):
        console.print(line, highlight=False)


def why_none(config: Config, cluster: Cluster) -> str:
    """Returns why no layout runs on the cluster, and what may help."""
    gpus, train = counted(cluster.size, "GPU"), config.train
    if not layouts(config, replace(cluster, memory=float("inf"))):
        batch = f"train.batch_size={train.batch_size}"
        return f"no layout of {config.name} divides {batch} over {gpus}: try other numbers of GPUs or another batch"
    full = replace(config, train=replace(train, recompute=Recompute.full))
    remedy = "train.recompute=full" if layouts(full, cluster) else "other numbers of GPUs"
    return (
        f"no layout of {config.name} with train.recompute={train.recompute.value} fits {gpus} of "
        f"{cluster.memory / GIB:g} GiB: try {remedy}"
    )


def counted(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'s' * (number != 1)}"


def predictions(rows: list[tuple[str, Prediction]], cluster: Cluster) -> Table:
    size = f"{counted(cluster.nodes, 'node')} of {counted(cluster.gpus, 'GPU')}"
    title = f"predicted on {size} with {cluster.network / 1e9:g} GB/s each; s per step"
    table = Table(title=title, box=ASCII, title_justify="left")
    table.add_column("layout", overflow="fold")
    for name in ("tokens/s", "per GPU", "step", "compute", "optimizer", "host", "exposed", "GiB"):
        table.add_column(name, justify="right", no_wrap=True)
    for label, row in rows:
        exposed = sum(row.exposed.values())
        seconds = (row.seconds, row.compute, row.optimizer, row.host, exposed)
        table.add_row(
            f"{label}: {row.label}" if label else row.label,
            f"{row.tokens_per_second:,.0f}",
            f"{row.tokens_per_second / cluster.size:,.0f}",
            *(f"{value:.3f}" for value in seconds),
            f"{row.memory.total / GIB:.1f}",
        )
    return table


def origin(config: Config, mfu: float | None) -> str:
    """Says where the constants of a prediction come from."""
    rate, measured = forward_mfu(config)
    source = (
        "given"
        if mfu is not None
        else f"measured on one GPU for {config.name}"
        if measured
        else (f"the lowest measured, as {config.name} was not measured")
    )
    return (
        f"MFU of forward and backward on one GPU: {mfu or rate:.3f}, {source}. Exposed: exchanges that nothing hides. "
        "Links within a node are as measured between two GPUs. "
        f"Not measured by micro-benchmarks yet: {', '.join(UNMEASURED)} (ssscale/train/scale.py has their sources)."
    )


def show(config: Config, gpus: int, mfu: float, result: Estimate) -> None:
    console = Console(markup=False, emoji=False)
    hours = result.days * gpus * 24
    train, parallel = config.train, config.parallel
    ranks = gpus // (parallel.tensor * parallel.context)  # ranks that read different rows
    table = Table(title=f"{config.name} on {counted(gpus, 'GPU')}", box=ASCII, show_header=False, title_justify="left")
    table.add_column(no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(overflow="fold")
    table.add_row("parameters", f"{result.parameters:,}", "")
    table.add_row("FLOPs per token", f"{result.flops_per_token:,.0f}", "6N + 12·L·d·S")
    table.add_row("", f"{result.flops_per_token_causal:,.0f}", "6N + 6·L·d·S, causal half")
    table.add_section()
    for part in ("weights", "gradients", "optimizer", "activations", "logits", "total"):
        note = f"{train.microbatch_rows} rows × {config.data.length:,} tokens" if part == "activations" else ""
        table.add_row(f"memory: {part}", f"{getattr(result.memory, part) / GIB:,.1f} GiB", note)
    table.add_row(
        "",
        f"ZeRO {parallel.zero_stage}, TP {parallel.tensor}, CP {parallel.context}",
        f"recompute {train.recompute.value}",
    )
    table.add_section()
    table.add_row(
        "batch",
        f"{config.tokens_per_step:,}",
        f"tokens; {counted(train.batch_size, 'row')} on {counted(ranks, 'rank')}",
    )
    table.add_row("accumulation", f"{train.batch_size // (train.microbatch_rows * ranks):,}", "microbatches per step")
    table.add_row("optimizer steps", f"{result.steps:,}", "")
    table.add_row("token budget", f"{result.tokens:,}", " + ".join(stage.name for stage in train.stages))
    table.add_section()
    table.add_row(
        "tokens/s per GPU", f"{result.tokens_per_second_per_gpu:,.0f}", f"MFU {mfu:.3g} of 989 TFLOP/s (H100)"
    )
    if train.fp8 is not Fp8.none:
        compiled = config.compiled() is not Compile.none
        why = "in the line above" if compiled else "whose casts are not compiled here"
        table.add_row("", f"× {fp8_speedup(config):.3f}", f"assumed gain of fp8 {train.fp8.value}, {why}")
    table.add_row("tokens per day", f"{result.tokens_per_day:,.0f}", "")
    table.add_row(
        "days to the budget",
        f"{result.days:,.1f}" if result.days >= 1 else f"{result.days:.2g}",
        f"{hours:,.0f} GPU hours" if hours >= 10 else f"{hours:.2g} GPU hours",
    )
    console.print(table)
    console.print("Not in the total: CUDA context, NCCL and fragmentation, 1 to 3 GiB.", highlight=False)


if __name__ == "__main__":
    run(COMMAND, main)
