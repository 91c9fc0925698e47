"""Jobs for the worker pool: train with and without `optimizer.adamw.one_pass`, and return the whole state of each rank."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ssscale.config.schema import Config, DataConfig, ModelConfig, ParallelConfig, TrainConfig, optimizer_config
from ssscale.engine.deepspeed import DeepSpeedEngine
from ssscale.errors import UserError
from ssscale.model.decoder import Decoder
from ssscale.model.init import initialize_weights
from ssscale.parallel.groups import Groups
from ssscale.train.checkpoint import CheckpointReader, TrainState, load_training_state, load_weights
from ssscale.train.checkpoint_folder import list_checkpoints
from ssscale.train.save import save_checkpoint
from tests.distributed.jobs import LENGTH, ROWS, regroup, train_step

TRAIN = "tests.train.update_jobs:train"
REFUSAL = "tests.train.update_jobs:refusal"


def make(
    model: ModelConfig, one_pass: bool, tensor: int, clip: float, load: str | None, bf16: bool = True
) -> tuple[DeepSpeedEngine, Groups]:
    groups = regroup(tensor)
    config = Config(
        model=model,
        data=DataConfig(length=LENGTH),
        # Matrices and vectors differ in learning rate and in weight decay.
        optimizer=replace(optimizer_config("adamw", one_pass=one_pass), clip=clip, vector_lr_multiplier=3.0),
        train=TrainConfig(batch_size=ROWS, microbatch=1),
        parallel=ParallelConfig(tensor=tensor, sequence=tensor > 1),
    )
    dtype = torch.bfloat16 if bf16 else torch.float32
    decoder = Decoder(model, groups, LENGTH, sequence_parallel=tensor > 1, dtype=dtype)
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
    microbatches: tuple[int, ...],
    tensor: int = 1,
    clip: float = 0.5,
    broken: int | None = None,
    unused: str | None = None,
    fp32_reduction: bool = False,
    first_step: int = 0,
    load: str | None = None,
    save: str | None = None,
    again: bool = False,
) -> dict[str, Any]:
    """Trains one step per entry of `microbatches`, the rows of each microbatch in it.

    broken: step in which a gradient of the last rank is NaN. unused: a weight that gets no gradient after the first step.
    fp32_reduction: whether DeepSpeed leaves fp32 sums as they are, which it otherwise rounds to bf16. again: whether the
    engine has trained a step before its state is restored from `load`.
    Returns losses, norms, the state and the bf16 weights by name, updates by group, and the bytes of fp32 sums after each step.
    """
    engine, groups = make(model, one_pass, tensor, clip, load)
    if fp32_reduction:
        engine.engine.communication_data_type = torch.float32
    if again:
        train_step(engine, groups, 0, 1, 0.01)
        assert load is not None
        reader = CheckpointReader(list_checkpoints(Path(load))[-1])
        load_weights(reader, engine.module, groups)
        load_training_state(reader, engine, groups)
    weights = dict(engine.module.named_parameters())
    results, sums = [], []
    for step, microbatch in enumerate(microbatches, first_step):
        engine.set_batch_size(ROWS, microbatch)
        if unused is not None and step > first_step:
            weights[unused].requires_grad_(False)
        factor = torch.nan if step == broken and groups.rank == groups.world_size - 1 else 1.0
        handle = weights["norm.weight"].register_hook(lambda gradient, factor=factor: gradient * factor)
        results.append(train_step(engine, groups, step, microbatch, 0.01))
        handle.remove()
        buffers = engine.engine.optimizer.fp32_groups_gradients_flat
        sums.append(sum(buffer.untyped_storage().nbytes() for buffer in buffers))
    if save is not None:
        done = first_step + len(microbatches)
        save_checkpoint(Path(save), engine, groups, TrainState(step=done, applied_steps=done))
    return {
        "losses": [loss for loss, _ in results],
        "norms": [norm for _, norm in results],
        "sums": sums,
        "state": {f"{f.state} {f.name} {f.start}": f.tensor.clone() for f in engine.fragments()},
        "steps": [float(state["step"]) for state in engine.optimizer.state.values()],
        "weights": {name: weight.detach().float() for name, weight in engine.module.named_parameters()},
    }


def refusal(model: ModelConfig) -> str:
    """The sentence for weights in fp32."""
    try:
        make(model, True, 1, 1.0, None, bf16=False)
    except UserError as error:
        return f"{type(error).__name__}: {error}"
    return ""
