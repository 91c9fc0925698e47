"""Jobs for the worker pool: ZeRO-3 with DeepSpeed's own step and hooks, and with ours."""

from contextlib import ExitStack
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from deepspeed.runtime.zero import partitioned_param_coordinator

from ssscale.config.choices import Compile
from ssscale.config.schema import Config, DataConfig, ParallelConfig, TrainConfig, optimizer_config
from ssscale.engine import deepspeed
from ssscale.engine.deepspeed import DeepSpeedEngine
from ssscale.layout import PackedLayout
from ssscale.model.decoder import Decoder
from ssscale.model.init import initialize_weights
from tests.distributed.compiled_models import make_model
from tests.distributed.gathered_jobs import gathered
from tests.distributed.jobs import regroup

LENGTH, STEPS = 32, 4


def compare(cases: dict[str, dict[str, Any]]) -> dict[str, tuple[dict[str, Any], dict[str, Any]]]:
    """Returns (DeepSpeed's, ours) by case. Our hooks stay in a process, so DeepSpeed's runs come first."""
    assert partitioned_param_coordinator.iter_params.__module__.startswith("deepspeed"), "needs new processes"
    theirs = {name: train(False, **case) for name, case in cases.items()}
    return {name: (theirs[name], train(True, **case)) for name, case in cases.items()}


def train(
    short: bool,
    clip: float = 0.0,
    tensor: int = 1,
    bf16: bool = False,
    gather: bool = True,
    largest_kept: int = 64,
    broken: int | None = None,
) -> dict[str, Any]:
    """Steps of two microbatches. largest_kept: DeepSpeed keeps smaller weights whole. broken: when rank 1 has a NaN."""
    groups = regroup(tensor)
    model = make_model("ssmax", layers=3)
    rows = 2 * groups.data_size
    config = Config(
        model=model,
        data=DataConfig(length=LENGTH),
        optimizer=replace(optimizer_config(), clip=clip),
        train=TrainConfig(batch_size=rows, microbatch=1, compile=Compile.block if gather else Compile.none),
        parallel=ParallelConfig(tensor=tensor, sequence=tensor > 1, zero_stage=3),
    )
    dtype = torch.bfloat16 if bf16 else torch.float32
    decoder = Decoder(model, groups, LENGTH, sequence_parallel=tensor > 1, dtype=dtype)
    initialize_weights(decoder, model, groups, seed=3)
    with ExitStack() as changes:
        changes.enter_context(gathered(largest_kept))
        for name in () if short else ("shorten_step", "shorten_hooks"):
            changes.enter_context(patch.object(deepspeed, name, lambda *_: None))
        engine = DeepSpeedEngine(decoder, config, groups)
    layout = PackedLayout.from_lengths([20, LENGTH - 20])
    losses, results = [], []
    for step in range(STEPS):
        for microbatch in range(2):
            generator = torch.Generator().manual_seed(100 * step + 10 * microbatch + groups.data_rank)
            tokens = torch.randint(0, model.vocab_size, (LENGTH,), generator=generator)
            losses.append(engine.forward_backward(tokens, layout, tokens.roll(-1), rows * LENGTH).losses.clone())
        if step == broken and dist.get_rank() == 1:
            engine.engine.optimizer.grad_partitions_flat_buffer[3] = float("nan")
        with patch.object(dist, "all_reduce", wraps=dist.all_reduce) as reduced:
            result = engine.step(0.01)
        results.append((result.grad_norm, result.skipped))
    return {
        "losses": torch.stack(losses),
        "norms": [norm for norm, skipped in results if not skipped],
        "skipped": [skipped for _, skipped in results],
        "states": {(f.name, f.state): f.tensor.clone() for f in engine.fragments()},
        "reductions": reduced.call_count,
        "elements": sum(weight.ds_numel for weight in decoder.parameters()),
    }
