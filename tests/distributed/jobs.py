"""Jobs for the worker pool: train a small model for a few steps under some parallel layout."""

import gc
import os
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from ssscale.config.choices import ShardWithin
from ssscale.config.schema import Config, DataConfig, ModelConfig, ParallelConfig, TrainConfig, optimizer_config
from ssscale.engine.deepspeed import DeepSpeedEngine
from ssscale.layout import IGNORE, PackedLayout
from ssscale.model.decoder import VOCAB_WEIGHTS, Decoder
from ssscale.model.init import initialize_weights
from ssscale.parallel.groups import Groups, initialize
from ssscale.parallel.megatron_patches import parallel_state
from ssscale.train.checkpoint import CheckpointReader, TrainState, check_shapes, load_training_state, load_weights
from ssscale.train.checkpoint_folder import list_checkpoints
from ssscale.train.save import save_checkpoint

LENGTH, ROWS, VOCAB = 24, 4, 300
TRAIN = "tests.distributed.jobs:train"  # the job below, for a pool


def make_row(row: int) -> tuple[torch.Tensor, list[int], torch.Tensor]:
    """(tokens, document lengths, labels) of a row: ragged documents, unequal numbers of targets."""
    generator = torch.Generator().manual_seed(1000 + row)
    tokens = torch.randint(0, VOCAB, (LENGTH,), generator=generator)
    cuts = [[24], [5, 19], [1, 11, 12], [7, 1, 1, 15]][row % 4]
    labels = tokens.roll(-1)
    labels[torch.tensor(cuts).cumsum(0) - 1] = IGNORE
    if row % 4 == 1:
        labels[:10] = IGNORE
    return tokens, cuts, labels


def make_batch(rows: list[int]) -> tuple[torch.Tensor, PackedLayout, torch.Tensor]:
    parts = [make_row(row) for row in rows]
    layout = PackedLayout.from_lengths([length for _, cuts, _ in parts for length in cuts], LENGTH)
    return torch.cat([p[0] for p in parts]), layout, torch.cat([p[2] for p in parts])


CURRENT: dict[tuple[int, int, int, int | ShardWithin], Groups] = {}


def regroup(tensor: int, ulysses: int = 1, ring: int = 1, shard_within: int | ShardWithin = ShardWithin.all) -> Groups:
    """Process groups for a layout. Those of the layout before are destroyed: a gloo group has a thread on each rank that
    wakes up 100 times per second, and the groups of all layouts (490 threads per rank) kept two cores busy with nothing.

    Megatron-core's 50 groups do not depend on shard_within: where only this differs, all groups are kept.
    """
    sizes = (tensor, ulysses, ring, shard_within)
    if sizes not in CURRENT:
        if not any(current[:3] == sizes[:3] for current in CURRENT):
            if dist.is_initialized():
                for group in set(distributed_c10d._world.pg_map) - {dist.group.WORLD}:
                    dist.destroy_process_group(group)
            CURRENT.clear()
            gc.collect()  # engines hold groups in cycles
            parallel_state.destroy_model_parallel()
        several = int(os.environ["WORLD_SIZE"]) > 1
        CURRENT[sizes] = initialize(tensor, distributed=several, ulysses=ulysses, ring=ring, shard_within=shard_within)
    return CURRENT[sizes]


def make_engine(
    model: ModelConfig, tensor: int, sequence: bool, zero: int, microbatch: int, load: str | None, bf16: bool
) -> tuple[DeepSpeedEngine, Groups]:
    """A small model under a layout, with initial weights or those of the newest checkpoint in `load`."""
    groups = regroup(tensor)
    config = Config(
        model=model,
        data=DataConfig(length=LENGTH),
        optimizer=replace(optimizer_config(), clip=0.5),
        train=TrainConfig(batch_size=ROWS, microbatch=microbatch),
        parallel=ParallelConfig(tensor=tensor, sequence=sequence, zero_stage=zero),
    )
    dtype = torch.bfloat16 if bf16 else torch.float32
    decoder = Decoder(model, groups, LENGTH, sequence_parallel=sequence, dtype=dtype)
    if load is None:
        initialize_weights(decoder, model, groups, seed=3)
        return DeepSpeedEngine(decoder, config, groups), groups
    reader = CheckpointReader(list_checkpoints(Path(load))[-1])
    check_shapes(reader, decoder, groups, VOCAB_WEIGHTS)
    load_weights(reader, decoder, groups)
    engine = DeepSpeedEngine(decoder, config, groups)
    load_training_state(reader, engine, groups)
    return engine, groups


def train_step(
    engine: DeepSpeedEngine, groups: Groups, step: int, microbatch: int, lr: float
) -> tuple[float, float | None]:
    """(mean loss over the step's targets, gradient norm)."""
    share = ROWS // groups.data_size
    rows = [step * ROWS + groups.data_rank * share + i for i in range(share)]
    all_labels = make_batch([step * ROWS + i for i in range(ROWS)])[2]
    num_targets = int((all_labels != IGNORE).sum())
    total = torch.zeros(())
    for first in range(0, share, microbatch):
        tokens, layout, labels = make_batch(rows[first : first + microbatch])
        total += engine.forward_backward(tokens, layout, labels, num_targets).losses.sum()
    torch.distributed.all_reduce(total, group=groups.replica_group)
    return total.item() / num_targets, engine.step(lr).grad_norm


def train(
    model: ModelConfig,
    tensor: int = 1,
    sequence: bool = False,
    zero: int = 1,
    microbatch: int = 1,
    steps: int = 4,
    first_step: int = 0,
    save: str | None = None,
    load: str | None = None,
    bf16: bool = False,
    lr: float = 0.01,
) -> dict[str, Any]:
    """Losses and gradient norms of a few steps; optionally resumed from, and ending in, a checkpoint."""
    engine, groups = make_engine(model, tensor, sequence, zero, microbatch, load, bf16)
    results = [train_step(engine, groups, step, microbatch, lr) for step in range(first_step, first_step + steps)]
    if save:
        state = TrainState(step=first_step + steps, applied_steps=first_step + steps)
        save_checkpoint(Path(save), engine, groups, state)
    return {"losses": [loss for loss, _ in results], "norms": [norm for _, norm in results]}


def waits_of_deepspeed(model: ModelConfig) -> int:
    """How often DeepSpeed lets the host wait for the GPU in six steps of two microbatches."""
    from deepspeed.accelerator import get_accelerator

    engine, groups = make_engine(model, 1, False, 1, ROWS // 2, None, True)
    with patch.object(type(get_accelerator()), "synchronize") as waits:
        for step in range(6):  # its timer begins with the third
            train_step(engine, groups, step, ROWS // 2, 0.01)
    return waits.call_count
