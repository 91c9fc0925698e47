"""Jobs for the worker pool: train a few steps with `train.fp8` in some parallel layout."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from ssscale.config.choices import Fp8, Recompute, ShardWithin
from ssscale.config.schema import Config, DataConfig, ParallelConfig, TrainConfig, optimizer_config
from ssscale.engine import casts
from ssscale.engine.deepspeed import DeepSpeedEngine
from ssscale.model.decoder import Decoder
from ssscale.model.init import initialize_weights
from ssscale.parallel import fp8
from ssscale.train.checkpoint import CheckpointReader, TrainState, load_training_state, load_weights
from ssscale.train.checkpoint_folder import list_checkpoints
from ssscale.train.save import save_checkpoint
from tests.distributed.compiled_models import make_model
from tests.distributed.jobs import LENGTH, ROWS, make_batch, regroup, train_step
from tests.distributed.overlap_jobs import digests, exchanging
from tests.model.fp8_reference import expected

MODEL = replace(make_model("softmax", 4), vocab_size=300)
TRAIN, SHARDS = "tests.train.fp8_jobs:train", "tests.train.fp8_jobs:shards"


def make_engine(
    recipe: str,
    tensor: int,
    sequence: bool,
    zero: int,
    microbatch: int,
    overlap: bool,
    recompute: str,
    compiled: bool,
    load: str | None,
    within: int | ShardWithin,
) -> tuple[DeepSpeedEngine, Any]:
    groups = replace(regroup(tensor, shard_within=within), in_graph=True)
    config = Config(
        model=MODEL,
        data=DataConfig(length=LENGTH),
        optimizer=optimizer_config(),
        train=TrainConfig(batch_size=ROWS, microbatch=microbatch, fp8=Fp8(recipe)),
        parallel=ParallelConfig(
            tensor=tensor, sequence=sequence, zero_stage=zero, overlap=overlap, shard_within=within
        ),
    )
    blocks = config.train.fp8_blocks(MODEL.num_layers)
    options = {
        "sequence_parallel": sequence,
        "recompute": Recompute(recompute),
        "fp8": Fp8(recipe),
        "fp8_blocks": blocks,
    }
    decoder = Decoder(MODEL, groups, LENGTH, dtype=torch.bfloat16, **options)
    if compiled:
        torch._dynamo.reset()
        decoder.compile_parts("aot_eager")
    if load is None:
        initialize_weights(decoder, MODEL, groups, seed=3)
        return DeepSpeedEngine(decoder, config, groups), groups
    reader = CheckpointReader(list_checkpoints(Path(load))[-1])
    load_weights(reader, decoder, groups)
    engine = DeepSpeedEngine(decoder, config, groups)
    load_training_state(reader, engine, groups)
    return engine, groups


@contextmanager
def counted(found: list[Tensor]) -> Iterator[None]:
    """Notes each weight that is cast."""

    def cast(weight: Tensor, recipe: str) -> fp8.CastWeight:
        found.append(weight.clone())
        return fp8.cast_weight(weight, recipe)

    with patch.object(casts, "cast_weight", cast):
        yield


def train(
    recipe: str = "rowwise",
    tensor: int = 1,
    sequence: bool = False,
    zero: int = 1,
    microbatch: int = 1,
    overlap: bool = False,
    way: str = "hidden",
    recompute: str = "none",
    compiled: bool = False,
    cache: str = "once",
    evaluate: bool = False,
    first: int = 0,
    steps: int = 3,
    load: str | None = None,
    save: str | None = None,
    again: bool = False,
    within: int | ShardWithin = ShardWithin.all,
) -> dict[str, Any]:
    """cache: `once`, as in runs; `always`, where each pass casts the weights; `stale`, where casts are kept for ever.

    evaluate: whether each step ends with a pass without gradients. again: whether the engine trains a step before its weights
    and state are restored from `load`. Returns losses, the state, casts per step, and whether casts were those of the weights.
    """
    seen: list[Tensor] = []
    with exchanging(way), counted(seen):
        engine, groups = make_engine(
            recipe, tensor, sequence, zero, microbatch, overlap, recompute, compiled, load, within
        )
        layers = [] if engine.casts is None else list(engine.casts.layers.values())
        if compiled:
            engine.casts._cast = casts.cast_weight  # else Inductor compiles it
        if cache == "stale":
            engine.casts.drop = lambda: None
        if again:
            train_step(engine, groups, 7, microbatch, 0.01)
            reader = CheckpointReader(list_checkpoints(Path(load))[-1])
            load_weights(reader, engine.module, groups)
            load_training_state(reader, engine, groups)
        losses, counts, evaluated = [], [], []
        forward_backward = engine.forward_backward

        def each(*arguments: Any) -> Any:
            if cache == "always":
                engine.casts.drop()
            return forward_backward(*arguments)

        engine.forward_backward = each
        for step in range(first, first + steps):
            seen.clear()
            losses.append(train_step(engine, groups, step, microbatch, 0.01)[0])
            counts.append(len(seen))
            if evaluate:
                tokens, layout, labels = make_batch([0])
                with torch.no_grad():
                    evaluated.append(engine.module(tokens, layout, labels).sum().item())
        engine.wait_for_weights()
        if save:
            save_checkpoint(Path(save), engine, groups, TrainState(step=first + steps, applied_steps=first + steps))
    return {"losses": losses, "state": digests(engine), "casts": counts, "layers": len(layers), "evaluated": evaluated}


def shards(recipe: str, sequence: bool, keep_gathered: bool = False) -> dict[str, float]:
    """Both products on two ranks beside the rounded operands of each rank, as largest relative differences."""
    groups = regroup(2)
    rank, ranks, name = groups.tensor_rank, 2, groups.tensor_group.group_name
    generator = torch.Generator().manual_seed(0)
    tokens, inner, size = 32, 48, 64
    whole = torch.randn(tokens, size, generator=generator).bfloat16()
    up, down = (torch.randn(ranks, *shape, generator=generator).bfloat16() for shape in ((inner, size), (size, inner)))
    hidden, gradient = (torch.randn(ranks, tokens, inner, generator=generator).bfloat16() for _ in range(2))
    own = slice(rank * tokens // ranks, (rank + 1) * tokens // ranks) if sequence else slice(None)
    found = {}

    def check(label: str, value: Tensor, parts: list[Tensor]) -> None:
        total = torch.stack(parts).sum(0)
        found[label] = float((value - total).norm() / total.norm())

    def multiply(x: Tensor, weight: Tensor, column: bool, y_gradient: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x, weight = x.clone().requires_grad_(), weight.clone().requires_grad_()
        out, back = fp8.cast_weight(weight.detach(), recipe)
        y = fp8.product(x, weight, *out, *back, recipe, column, ranks, name, sequence, keep_gathered)
        y.backward(y_gradient)
        return y.detach(), x.grad, weight.grad

    y, x_gradient, weight_gradient = multiply(whole[own], up[rank], True, gradient[rank])
    each = [expected(recipe, whole, up[r], gradient[r]) for r in range(ranks)]
    check("column values", y, [each[rank]["values"][0]])
    check("column x", x_gradient, [part["x"][0][own] for part in each])
    check("column weight", weight_gradient, [each[rank]["weight"][0]])
    y, x_gradient, weight_gradient = multiply(hidden[rank], down[rank], False, whole[own])
    each = [expected(recipe, hidden[r], down[r], whole) for r in range(ranks)]
    check("row values", y, [part["values"][0][own] for part in each])
    check("row x", x_gradient, [each[rank]["x"][0]])
    check("row weight", weight_gradient, [each[rank]["weight"][0]])
    dist.barrier()
    return found
