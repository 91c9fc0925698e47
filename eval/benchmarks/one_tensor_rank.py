"""Measures one tensor-parallel rank alone on one device: how long the host takes with blocks in pieces and as a whole.

torch's fake process group takes the place of NCCL. Exchanges return at once and bring no values; everything else of the
rank's forward and backward pass is as in a run. The table compares ways to compile the blocks, and one rank that
has the whole model, as a data-parallel rank does:

    pieces               train.compile_exchanges=false: graphs between the exchanges
    whole                train.compile_exchanges=true, which auto is on GPUs
    whole, …             also parallel.keep_gathered=true, or parallel.overlap_gathers=true
    tensor=1             the whole model

`host` is the time per layer for a row of 128 tokens, for which the device waits for the host. The other columns are for
rows of `data.length` tokens. All are medians of `steps` microbatches after three others, forward and backward, without
optimizer. Options that make a mixer skip work are off, because the values that ranks exchange are arbitrary here. Without
a GPU, computing is part of the host's time, and torch.compile needs g++.
"""

import sys
import warnings

from eval.checkpoint.command import sentences, whole_numbers
from ssscale.config import load_config
from ssscale.options import EVERY_KEY, Command, Option

WAYS = {
    "pieces": [],
    "whole": ["train.compile_exchanges=true"],
    "whole, keep_gathered": ["train.compile_exchanges=true", "parallel.keep_gathered=true"],
    "whole, overlap_gathers": ["train.compile_exchanges=true", "parallel.overlap_gathers=true"],
    "tensor=1": ["parallel.tensor=1"],
}
COMMAND = Command(
    about=__doc__,
    usage="python -m eval.benchmarks.one_tensor_rank config=NAME [key=value ...]",
    example="python -m eval.benchmarks.one_tensor_rank config=1b_sb rows=4,8",
    options=(
        Option("config", str, "the run file", required=True, metavar="NAME"),
        Option("tensor", int, "tensor-parallel ranks, of which one is measured", default=2, at_least=2),
        Option("rows", str, "rows per microbatch", default="4", metavar="ROWS,..."),
        Option("steps", int, "microbatches that are timed", default=10, at_least=1),
    ),
    keys=EVERY_KEY,
)


def main(argv: list[str]) -> None:
    options, keys = COMMAND.parse(argv)
    rows = whole_numbers(options["rows"], "rows")
    given = [f"config={options['config']}", f"parallel.tensor={options['tensor']}", *keys]
    exact = [
        f"model.mixer.{name}.{option}={value}"
        for name, mixer in load_config(given).model.used.items()
        for option, value in mixer.exact.items()
    ]
    configs = {name: load_config([*given, *exact, *changes]) for name, changes in WAYS.items()}
    import torch  # it takes seconds, and --help needs none of it

    from eval.benchmarks.rank_alone import measure
    from ssscale.validate import validate

    for config in configs.values():
        validate(config, gpu=torch.cuda.is_available())
    print("| blocks | host, ms per layer |" + "".join(f" {n} rows: ms | launched after | tokens/s |" for n in rows))
    print("|---|---|" + "---|---|---|" * len(rows))
    for name, config in configs.items():
        print(f"| {name} | {' | '.join(measure(config, rows, options['steps']))} |", flush=True)


if __name__ == "__main__":
    warnings.filterwarnings("ignore")  # of Megatron-core about parts that we do not use
    with sentences(COMMAND):
        main(sys.argv[1:])
