"""One tensor-parallel rank whose other ranks do not exist, for `eval.benchmarks.one_tensor_rank`."""

import statistics
import time
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from ssscale.config.schema import Config
from ssscale.layout import PackedLayout
from ssscale.model.decoder import Decoder
from ssscale.model.init import initialize_weights
from ssscale.parallel.groups import Groups, initialize, shutdown
from ssscale.train.build import build_model, choose_dtype

SHORT = 128  # tokens of the row that shows the host's time
WARMUP = 3


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


def measure(config: Config, rows: list[int], steps: int) -> list[str]:
    """Returns the cells of one way to compile the blocks. rows: rows per microbatch of each measurement."""
    groups = join_alone(config)
    decoder = compiled_model(config, groups)
    cells = [f"{time_microbatches(decoder, 1, SHORT, steps).done / config.model.num_layers:.3f}"]
    for count in rows:
        torch._dynamo.reset()  # else the second length compiles graphs for any length
        times = time_microbatches(decoder, count, config.data.length, steps)
        rate = 1e3 * count * config.data.length / times.done
        cells += [f"{times.done:.1f}", f"{times.launched:.1f}", f"{rate:,.0f}"]
    shutdown()
    return cells
