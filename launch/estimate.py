"""Estimate what a run costs before it starts.

Prints parameters, FLOPs per token, memory per GPU by part, tokens per day and days to the token budget. Needs no GPU.
"""

from rich.box import ASCII
from rich.console import Console
from rich.table import Table

from launch.boot import EVERY_KEY, Command, Option, run
from ssscale.config import load_config
from ssscale.config.schema import Config
from ssscale.train.estimate import Estimate, estimate
from ssscale.train.microbatch import H100_MEMORY, fits, with_microbatch
from ssscale.validate import validate

COMMAND = Command(
    about=__doc__,
    usage="python launch/estimate.py config=NAME [gpus=N] [mfu=X] [gpu_memory=GIB] [key=value ...]",
    example="python launch/estimate.py config=3b_sb gpus=64",
    options=(
        Option("gpus", int, "GPUs of the run", default=8, at_least=1),
        Option("mfu", float, "assumed share of the GPUs' bf16 peak", default=0.4, above=0, at_most=1),
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
GIB = 2**30


def main(argv: list[str]) -> None:
    options, arguments = COMMAND.parse(argv)
    gpus, mfu, memory = options["gpus"], options["mfu"], options["gpu_memory"] * GIB
    config = load_config(arguments, options=COMMAND.names)
    validate(config, world_size=gpus, gpu=True)
    config = with_microbatch(config, config.train.batch_size, gpus, memory)
    show(config, gpus, mfu, estimate(config, gpus, mfu))
    if not fits(config, gpus, memory):
        print(f"More than the {memory / GIB:g} GiB of a GPU (gpu_memory=) leaves room for.")


def show(config: Config, gpus: int, mfu: float, result: Estimate) -> None:
    console = Console()
    train, parallel = config.train, config.parallel
    ranks = gpus // (parallel.tensor * parallel.context)  # ranks that read different rows
    table = Table(title=f"{config.name} on {gpus:,} GPUs", box=ASCII, show_header=False, title_justify="left")
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
    table.add_row("batch", f"{config.tokens_per_step:,}", f"tokens; {train.batch_size:,} rows on {ranks:,} ranks")
    table.add_row("accumulation", f"{train.batch_size // (train.microbatch_rows * ranks):,}", "microbatches per step")
    table.add_row("optimizer steps", f"{result.steps:,}", "")
    table.add_row("token budget", f"{result.tokens:,}", " + ".join(stage.name for stage in train.stages))
    table.add_section()
    table.add_row("tokens/s a GPU", f"{result.tokens_per_second_per_gpu:,.0f}", f"MFU {mfu:g} of 989 TFLOP/s (H100)")
    table.add_row("tokens per day", f"{result.tokens_per_day:,.0f}", "")
    table.add_row("days to the budget", f"{result.days:,.1f}", f"{result.days * gpus * 24:,.0f} GPU hours")
    console.print(table)
    console.print("Not in the total: CUDA context, NCCL and fragmentation, 1 to 3 GiB.", highlight=False)


if __name__ == "__main__":
    run(COMMAND, main)
