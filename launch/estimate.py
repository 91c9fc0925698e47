"""What a run costs, before it starts:   python launch/estimate.py config=3b_sb gpus=64 [mfu=0.4] [gpu_memory=79] [key=value]

Prints parameters, FLOPs per token, memory per GPU by part, tokens per day and days to the token budget. Needs no GPU.
gpu_memory: GiB of one GPU, by which train.microbatch=auto becomes a number (79, an 80 GB H100).
"""

import sys
from pathlib import Path

if not __package__:  # run as a file: imports start at the repository's root, not in launch/
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from rich.box import ASCII
from rich.console import Console
from rich.table import Table

from launch.cli import run, take_options
from ssscale.config import load_config, validate
from ssscale.errors import UserError
from ssscale.schema import Config
from ssscale.train.estimate import Estimate, estimate
from ssscale.train.microbatch import H100_MEMORY, fits, with_microbatch

OPTIONS = {"gpus": int, "mfu": float, "gpu_memory": float}
GIB = 2**30


def main(argv: list[str]) -> None:
    options, arguments = take_options(argv, OPTIONS)
    gpus, mfu = options.get("gpus", 8), options.get("mfu", 0.4)
    if gpus < 1:
        raise UserError(f"gpus must be at least 1, not {gpus}")
    if not 0 < mfu <= 1:
        raise UserError(f"mfu must be above 0 and at most 1, not {mfu:g}")
    memory = options.get("gpu_memory", H100_MEMORY / GIB) * GIB
    if memory <= 0:
        raise UserError(f"gpu_memory must be above 0, not {options['gpu_memory']:g}")
    config = load_config(arguments, options=OPTIONS)
    validate(config, world_size=gpus, gpu=True)
    config = with_microbatch(config, config.train.batch_size, gpus, memory)
    show(config, gpus, mfu, estimate(config, gpus, mfu))
    if not fits(config, gpus, memory):
        print(f"More than the {memory / GIB:g} GiB of a GPU (gpu_memory=) leaves room for.")


def show(config: Config, gpus: int, mfu: float, result: Estimate) -> None:
    console = Console()
    train, parallel = config.train, config.parallel
    ranks = gpus // (parallel.tensor * parallel.context)  # that read different rows
    table = Table(title=f"{config.name} on {gpus:,} GPUs", box=ASCII, show_header=False, title_justify="left")
    table.add_column(no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(overflow="fold")
    table.add_row("parameters", f"{result.parameters:,}", "")
    table.add_row("FLOPs a token", f"{result.flops_per_token:,.0f}", "6N + 12·L·d·S")
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
    table.add_row("batch", f"{config.tokens_per_step:,}", f"tokens; {train.batch_size:,} rows on {ranks:,} ranks")
    table.add_row("accumulation", f"{train.batch_size // (train.microbatch_rows * ranks):,}", "microbatches a step")
    table.add_row("optimizer steps", f"{result.steps:,}", "")
    table.add_row("token budget", f"{result.tokens:,}", " + ".join(stage.name for stage in train.stages))
    table.add_section()
    table.add_row("tokens/s a GPU", f"{result.tokens_per_second_per_gpu:,.0f}", f"MFU {mfu:g} of 989 TFLOP/s (H100)")
    table.add_row("tokens a day", f"{result.tokens_per_day:,.0f}", "")
    table.add_row("days to the budget", f"{result.days:,.1f}", f"{result.days * gpus * 24:,.0f} GPU hours")
    console.print(table)
    console.print("Not in the total: CUDA context, NCCL and fragmentation, 1 to 3 GiB.", highlight=False)


if __name__ == "__main__":
    run(main, __doc__)
