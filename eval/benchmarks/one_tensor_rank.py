"""Measures one tensor-parallel rank alone on one device: how long the host takes with blocks in pieces and as a whole.

torch's fake process group takes the place of NCCL. Exchanges return at once and bring no values; everything else of the
rank's forward and backward pass is as in a run. The table compares ways to compile the blocks, and one rank that
has the whole model, as a data-parallel rank does:

    pieces               graphs between the exchanges (the default)
    whole                train.compile_exchanges=true
    whole, …             also parallel.keep_gathered=true, or parallel.overlap_gathers=true
    tensor=1             the whole model

`host` is the time per layer for a row of 128 tokens, for which the device waits for the host. The other columns are for
rows of `data.length` tokens. All are medians of `steps` microbatches after three others, forward and backward, without
optimizer. Options that make a mixer skip work are off, because the values that ranks exchange are arbitrary here. Without
a GPU, computing is part of the host's time, and torch.compile needs g++.
"""

import statistics
import sys
import time
import warnings
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from eval.checkpoint.command import sentences, whole_numbers
from ssscale.config import load_config
from ssscale.config.schema import Config
from ssscale.layout import PackedLayout
from ssscale.model.decoder import Decoder
from ssscale.model.init import initialize_weights
from ssscale.options import EVERY_KEY, Command, Option
from ssscale.parallel.groups import Groups, initialize, shutdown
from ssscale.train.build import build_model, choose_dtype
from ssscale.validate import validate

SHORT = 128  # tokens of the row that shows the host's time
WARMUP = 3
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


class Times(NamedTuple):
    """Milliseconds of a microbatch: until the host has launched it, and until the device has computed it."""

    launched: float
    done: float


def join_alone(config: Config) -> Groups:
    """Returns the groups of rank 0 of a tensor-parallel group whose other ranks do not exist."""
    dist.init_process_group("fake", rank=0, world_size=config.parallel.tensor, store=FakeStore())
    new_group = dist.new_group

    def fake_group(*arguments: Any, backend: str | None = None, **more: Any) -> Any:
        return new_group(*arguments, **more)  # Megatron-core asks for one gloo group, which a FakeStore cannot connect

    with mock.patch.object(dist, "new_group", fake_group):
        return initialize(config.parallel.tensor)


def compiled_model(config: Config, groups: Groups) -> Decoder:
    torch._dynamo.reset()
    decoder = build_model(config, groups, choose_dtype(config.train.precision, groups.device))
    initialize_weights(decoder, config.model, groups, config.train.seed)
    decoder.compile_parts()
    return decoder


def time_microbatches(decoder: Decoder, rows: int, length: int, steps: int) -> Times:
    """Returns the medians over `steps` microbatches of `rows` rows, each of which is one document."""
    device = decoder.groups.device
    tokens = torch.arange(rows * length, device=device) % decoder.config.vocab_size
    layout = PackedLayout.from_lengths([length] * rows, length).to(device)
    found = []
    for _ in range(WARMUP + steps):
        decoder.zero_grad()
        _synchronize(device)
        start = time.perf_counter()
        decoder(tokens, layout, tokens.roll(-1)).mean().backward()
        launched = time.perf_counter()
        _synchronize(device)
        found.append((launched - start, time.perf_counter() - start))
    return Times(*(1e3 * statistics.median(column) for column in zip(*found[WARMUP:], strict=True)))


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


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
    for config in configs.values():
        validate(config, gpu=torch.cuda.is_available())
    print("| blocks | host, ms per layer |" + "".join(f" {n} rows: ms | launched after | tokens/s |" for n in rows))
    print("|---|---|" + "---|---|---|" * len(rows))
    for name, config in configs.items():
        groups = join_alone(config)
        decoder = compiled_model(config, groups)
        cells = [f"{time_microbatches(decoder, 1, SHORT, options['steps']).done / config.model.num_layers:.3f}"]
        for count in rows:
            torch._dynamo.reset()  # else the second length compiles graphs for any length
            times = time_microbatches(decoder, count, config.data.length, options["steps"])
            rate = 1e3 * count * config.data.length / times.done
            cells += [f"{times.done:.1f}", f"{times.launched:.1f}", f"{rate:,.0f}"]
        print(f"| {name} | {' | '.join(cells)} |", flush=True)
        shutdown()


if __name__ == "__main__":
    warnings.filterwarnings("ignore")  # of Megatron-core about parts that we do not use
    with sentences(COMMAND):
        main(sys.argv[1:])
