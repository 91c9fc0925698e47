"""Jobs for the worker pool: train with and without `optimizer.adamw.one_pass`, and return the whole state of each rank."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ssscale.config.schema import Config, DataConfig, ModelConfig, ParallelConfig, TrainConfig, optimizer_config
from ssscale.engine.deepspeed import DeepSpeedEngine
from ssscale.model.decoder import Decoder
from ssscale.model.init import initialize_weights
from ssscale.parallel.groups import Groups
from ssscale.train.checkpoint import CheckpointReader, TrainState, load_training_state, load_weights
from ssscale.train.checkpoint_folder import list_checkpoints
from ssscale.train.save import save_checkpoint
from tests.distributed.jobs import LENGTH, ROWS, regroup, train_step

TRAIN = "tests.train.update_jobs:train"


def make(
    model: ModelConfig, one_pass: bool, tensor: int, microbatch: int, clip: float, load: str | None
) -> tuple[DeepSpeedEngine, Groups]:
    groups = regroup(tensor)
    config = Config(
        model=model,
        data=DataConfig(length=LENGTH),
        # Every group of weights has its own learning rate or weight decay.
        optimizer=replace(optimizer_config("adamw", one_pass=one_pass), clip=clip, vector_lr_multiplier=3.0),
        train=TrainConfig(batch_size=ROWS, microbatch=microbatch),
        parallel=ParallelConfig(tensor=tensor, sequence=tensor > 1),
    )
    decoder = Decoder(model, groups, LENGTH, sequence_parallel=tensor > 1, dtype=torch.bfloat16)
    if load is None:
        initialize_weights(decoder, model, groups, seed=3)
        return DeepSpeedEngine(decoder, config, groups), groups
    reader = CheckpointReader(list_checkpoints(Path(load))[-1])
    load_weights(reader, decoder, groups)
    engine = DeepSpeedEngine(decoder, config, groups)
    load_training_state(reader, engine, groups)
    return engine, groups


def train(
    model: ModelConfig,
    one_pass: bool,
    tensor: int = 1,
    microbatches: tuple[int, ...] = (1, 1, 1),
    clip: float = 0.5,
    broken: int | None = None,
    unused: str | None = None,
    load: str | None = None,
    save: str | None = None,
    first_step: int = 0,
) -> dict[str, Any]:
    """Trains one step per entry of `microbatches` (rows per microbatch).

    broken: step in which a weight of the last rank becomes Inf for the forward pass. unused: a weight that gets no gradient.
    Returns losses, norms, which steps were skipped, the state by weight, the bf16 weights, and bytes of fp32 sums.
    """
    engine, groups = make(model, one_pass, tensor, microbatches[0], clip, load)
    weights = dict(engine.module.named_parameters())
    if unused is not None:
        weights[unused].requires_grad_(False)
    results, skipped, sums = [], [], []
    for step, microbatch in enumerate(microbatches, first_step):
        engine.set_batch_size(ROWS, microbatch)
        weight = weights["norm.weight"]
        kept = weight.detach().clone()
        if step == broken and groups.rank == groups.world_size - 1:
            weight.data.fill_(torch.inf)
        step_result = []
        engine_step = engine.step

        def stepped(lr: float, kept: torch.Tensor = kept, weight: torch.Tensor = weight) -> Any:
            weight.data.copy_(kept)
            step_result.append(engine_step(lr))  # noqa: B023
            return step_result[-1]

        engine.step = stepped  # type: ignore[method-assign]
        results.append(train_step(engine, groups, step, microbatch, 0.01))
        engine.step = engine_step  # type: ignore[method-assign]
        skipped.append(step_result[0].skipped)
        buffers = engine.engine.optimizer.fp32_groups_gradients_flat
        sums.append(sum(buffer.untyped_storage().nbytes() for buffer in buffers))
    if save is not None:
        state = TrainState(step=first_step + len(microbatches), applied_steps=first_step + len(microbatches))
        save_checkpoint(Path(save), engine, groups, state)
    return {
        "losses": [loss for loss, _ in results],
        "norms": [norm for _, norm in results],
        "skipped": skipped,
        "sums": sums,
        "state": {f"{f.state} {f.name} {f.start}": f.tensor.clone() for f in engine.fragments()},
        "weights": {name: weight.detach().float() for name, weight in engine.module.named_parameters()},
    }
