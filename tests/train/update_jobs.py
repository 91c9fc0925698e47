"""Jobs for the worker pool: train with the update in one pass, with DeepSpeed's own and with plain torch.

Each returns the whole state of each rank."""

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from ssscale.config.schema import Config, DataConfig, ModelConfig, ParallelConfig, TrainConfig, optimizer_config
from ssscale.engine.deepspeed import DeepSpeedEngine
from ssscale.layout import IGNORE
from ssscale.model.decoder import Decoder
from ssscale.model.init import initialize_weights
from ssscale.optim.adamw import AdamW
from ssscale.optim.base import settings_of
from ssscale.parallel.groups import Groups
from ssscale.train.checkpoint import CheckpointReader, TrainState, load_training_state, load_weights
from ssscale.train.checkpoint_folder import list_checkpoints
from ssscale.train.save import save_checkpoint
from tests.distributed.jobs import LENGTH, ROWS, make_batch, regroup, train_step

TRAIN = "tests.train.update_jobs:train"
PLAIN = "tests.train.update_jobs:plain"
REPLACED = "tests.train.update_jobs:replaced"
LR = 0.01


def configured(model: ModelConfig, tensor: int, clip: float, stage: int = 1) -> Config:
    return Config(
        model=model,
        data=DataConfig(length=LENGTH),
        # Matrices and vectors differ in learning rate and in weight decay.
        optimizer=replace(optimizer_config("adamw"), clip=clip, vector_lr_multiplier=3.0),
        train=TrainConfig(batch_size=ROWS, microbatch=1),
        parallel=ParallelConfig(tensor=tensor, sequence=tensor > 1, zero_stage=stage),
    )


def make(
    model: ModelConfig, one_pass: bool, tensor: int, clip: float, load: str | None
) -> tuple[DeepSpeedEngine, Groups]:
    """one_pass: False for DeepSpeed's own step."""
    groups, config = regroup(tensor), configured(model, tensor, clip)
    decoder = Decoder(model, groups, LENGTH, sequence_parallel=tensor > 1, dtype=torch.bfloat16)
    with nullcontext() if one_pass else patch.object(AdamW, "one_pass", False):
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
    microbatches: tuple[int, ...],
    one_pass: bool = True,
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
        train_step(engine, groups, 0, 1, LR)
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
        results.append(train_step(engine, groups, step, microbatch, LR))
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


def plain(model: ModelConfig, microbatches: tuple[int, ...], clip: float = 0.5) -> dict[str, Any]:
    """The same training by a loop of plain torch: bf16 weights, fp32 masters and sums, torch's clipping and AdamW."""
    groups, config = regroup(1), configured(model, 1, clip)
    decoder = Decoder(model, groups, LENGTH, dtype=torch.bfloat16)
    initialize_weights(decoder, model, groups, seed=3)
    weights = dict(decoder.named_parameters())
    masters = {name: weight.detach().float().requires_grad_() for name, weight in weights.items()}
    settings = [settings_of(name, weight.dim(), config) for name, weight in weights.items()]
    optimizer = torch.optim.AdamW(
        [
            {"params": [master], "lr": LR * s["lr_scale"], "weight_decay": s["weight_decay"]}
            for master, s in zip(masters.values(), settings, strict=True)
        ],
        betas=(0.9, 0.95),
        eps=1e-8,
        foreach=False,
        fused=False,
    )
    losses, norms = [], []
    for step, microbatch in enumerate(microbatches):
        rows = [step * ROWS + i for i in range(ROWS)]
        num_targets = int((make_batch(rows)[2] != IGNORE).sum())
        total = torch.zeros(())
        for first in range(0, ROWS, microbatch):
            tokens, layout, labels = make_batch(rows[first : first + microbatch])
            found = decoder(tokens, layout, labels)
            (found.sum() / num_targets).backward()
            total += found.detach().sum()
            for name, weight in weights.items():
                given = weight.grad.float()
                masters[name].grad = given if masters[name].grad is None else masters[name].grad + given
                weight.grad = None
        norms.append(float(torch.nn.utils.clip_grad_norm_(masters.values(), clip)))
        optimizer.step()
        optimizer.zero_grad()
        for name, weight in weights.items():
            weight.data.copy_(masters[name])
        losses.append(total.item() / num_targets)
    return {"losses": losses, "norms": norms, "state": {name: master.detach() for name, master in masters.items()}}


def replaced(model: ModelConfig, stage: int, bf16: bool) -> bool:
    """Whether an engine updates weights in one pass."""
    groups = regroup(1)
    dtype = torch.bfloat16 if bf16 else torch.float32
    decoder = Decoder(model, groups, LENGTH, dtype=dtype)
    initialize_weights(decoder, model, groups, seed=3)
    return DeepSpeedEngine(decoder, configured(model, 1, 1.0, stage), groups).update is not None
