"""Jobs for the worker pool: steps of Muon under a layout, and the same steps by torch's optimizers."""

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch
from zlib import crc32

import torch
from torch import Tensor, nn

from ssscale.config.choices import ShardWithin
from ssscale.config.schema import Config, DataConfig, ModelConfig, ParallelConfig, TrainConfig, optimizer_config
from ssscale.engine.deepspeed import DeepSpeedEngine
from ssscale.errors import UserError
from ssscale.model.decoder import Decoder
from ssscale.model.init import initialize_weights
from ssscale.optim.muon import is_matrix
from ssscale.parallel.groups import Groups
from ssscale.parallel.splits import global_shape, local_part
from ssscale.train.checkpoint import CheckpointReader, TrainState, load_training_state, load_weights
from ssscale.train.checkpoint_folder import list_checkpoints
from ssscale.train.hooks.guard import check_copies
from ssscale.train.save import save_checkpoint
from tests.distributed.jobs import regroup
from tests.distributed.matrix_jobs import LENGTH, MODELS, ROWS, train_step

GIVEN, TORCH, TRAIN, MOVE = (f"tests.optim.muon_jobs:{job}" for job in ("given", "by_torch", "train", "move"))
# Grouped queries: Q [64, 32], K and V [32, 32] in one weight, and SSMax's s. A small vocabulary.
MODEL = MODELS["ssmax"][0]
SMALL = replace(MODEL, vocab_size=300, tie_embeddings=False)
BUCKET = 3000  # elements of a bucket of parallel.overlap, so that there are several
STEPS, RATE = 3, 0.01


def make(
    model: ModelConfig,
    tensor: int = 1,
    ulysses: int = 1,
    ring: int = 1,
    overlap: bool = False,
    within: int | ShardWithin = ShardWithin.all,
    accumulation: int = 1,
    dtype: torch.dtype = torch.float32,
    load: str | None = None,
    name: str = "muon",
    **options: Any,
) -> tuple[DeepSpeedEngine, Groups]:
    """options: of `optimizer.muon`. load: a folder of checkpoints, of which the newest is read."""
    groups = regroup(tensor, ulysses, ring, within)
    config = Config(
        model=model,
        data=DataConfig(length=LENGTH),
        # Above the rounding of gradients that are zero: Adam would make whole steps of it.
        # No clipping: the norm is a sum in another order in every layout.
        optimizer=replace(optimizer_config(name, **{"eps": 1e-6} | options), clip=0.0, vector_lr_multiplier=3.0),
        train=TrainConfig(batch_size=ROWS, microbatch=ROWS // accumulation // groups.data_size),
        parallel=ParallelConfig(
            tensor=tensor, sequence=tensor > 1, ulysses=ulysses, ring=ring, overlap=overlap, shard_within=within
        ),
    )
    decoder = Decoder(model, groups, LENGTH, dtype=dtype, sequence_parallel=tensor > 1)
    if load is None:
        initialize_weights(decoder, model, groups, seed=3)
    else:
        reader = CheckpointReader(list_checkpoints(Path(load))[-1])
        load_weights(reader, decoder, groups)
    with patch("ssscale.engine.deepspeed.overlap_bucket", lambda replicas: BUCKET):
        engine = DeepSpeedEngine(decoder, config, groups)
    if load is not None:
        load_training_state(reader, engine, groups)
    return engine, groups


def gradient(name: str, shape: list[int], step: int) -> Tensor:
    """Made up. Rows of a vocabulary's padding have none."""
    generator = torch.Generator().manual_seed(crc32(f"{name} {step}".encode()))
    rows = SMALL.vocab_size if name in ("embedding.weight", "head.weight") else shape[0]
    made = torch.zeros(shape)
    made[:rows] = torch.randn(rows, *shape[1:], generator=generator) * 0.01
    return made


def given(save: str, **layout: Any) -> None:
    """Updates the weights STEPS times with the gradients of `gradient`, and saves them."""
    engine, groups = make(SMALL, **layout)
    for step in range(STEPS):
        for group in engine.optimizer.param_groups:
            group["lr"] = RATE * group["lr_scale"]
            group["params"][0].grad = torch.zeros_like(group["params"][0])
        for name, weight in engine.module.named_parameters():
            if (mapping := weight._hp_mapping) is not None:  # type: ignore[attr-defined]
                whole = gradient(name, global_shape(weight, groups.tensor_size), step)
                own = local_part(whole, weight, groups.tensor_rank, groups.tensor_size).flatten()
                here, there = mapping.get_hp_fragment_address(), mapping.lp_fragment_address
                flat = engine.optimizer.param_groups[mapping.param_group_index]["params"][0]
                flat.grad[here.start : here.start + here.numel] = own[there.start : there.start + there.numel]
        engine.optimizer.step()
    check_copies(engine, groups, STEPS)
    save_checkpoint(Path(save), engine, groups, TrainState(step=STEPS, applied_steps=STEPS))


def by_torch(nesterov: bool = True) -> dict[str, dict[str, Tensor]]:
    """The weights and first moments after the steps of `given`, by torch.optim.Muon and AdamW, stacks as one matrix each."""
    groups = regroup(1)
    decoder = Decoder(SMALL, groups, LENGTH)
    initialize_weights(decoder, SMALL, groups, seed=3)
    parts = {
        name: [nn.Parameter(part.clone()) for part in weight.detach().split(weight.stripes)]
        if is_matrix(name, weight) and len(weight.stripes) > 1
        else [nn.Parameter(weight.detach().clone())]
        for name, weight in decoder.named_parameters()
    }
    kinds: dict[str, list[nn.Parameter]] = {"matrix": [], "vocabulary": [], "vector": []}
    for name, weight in decoder.named_parameters():
        vocabulary = name in ("embedding.weight", "head.weight")
        kinds["vector" if weight.dim() == 1 else "vocabulary" if vocabulary else "matrix"] += parts[name]
    decayed = {"params": kinds["vocabulary"], "lr": RATE, "weight_decay": 0.1}
    plain = {"params": kinds["vector"], "lr": 3 * RATE, "weight_decay": 0.0}
    adamw = torch.optim.AdamW([decayed, plain], betas=(0.9, 0.95), eps=1e-6, fused=True)
    muon = torch.optim.Muon(
        kinds["matrix"], lr=RATE, weight_decay=0.1, nesterov=nesterov, adjust_lr_fn="match_rms_adamw"
    )
    for step in range(STEPS):
        for name, weight in decoder.named_parameters():
            whole = gradient(name, list(weight.shape), step)
            for part, own in zip(parts[name], whole.split([len(part) for part in parts[name]]), strict=True):
                part.grad = own.clone()
        adamw.step()
        muon.step()
    state = {**adamw.state, **muon.state}
    moments = {part: found.get("exp_avg", found.get("momentum_buffer")) for part, found in state.items()}
    return {
        "weight": {name: torch.cat([part.detach() for part in own]) for name, own in parts.items()},
        "exp_avg": {name: torch.cat([moments[part] for part in own]) for name, own in parts.items()},
    }


def in_halves(x: Tensor, y: Tensor, **options: Any) -> Tensor:
    """x y, where y [K, N] is a weight: the sum over each half of K, then the sum of both."""
    if y.dim() != 2:
        return matmul(x, y, **options)
    half = len(y) // 2
    return matmul(x[..., :half], y[:half]) + matmul(x[..., half:], y[half:])


matmul = torch.matmul


def train(
    save: str | None = None, first: int = 0, steps: int = STEPS, halves: bool = False, **layout: Any
) -> dict[str, list[Any]]:
    """Losses and gradient norms of some steps, which end in a checkpoint. halves: `in_halves` multiplies by weights."""
    engine, groups = make(MODEL, **layout)
    with patch.object(torch, "matmul", in_halves) if halves else nullcontext():
        results = [train_step(engine, groups, step) for step in range(first, first + steps)]
    check_copies(engine, groups, first + steps)
    if save is not None:
        save_checkpoint(Path(save), engine, groups, TrainState(step=first + steps, applied_steps=first + steps))
    return {"losses": [loss for loss, _ in results], "norms": [norm for _, norm in results]}


def move(load: str, save: str, **layout: Any) -> str:
    """Loads a checkpoint in this layout and saves it again. Returns what a user reads if it is refused."""
    try:
        engine, groups = make(MODEL, load=load, **layout)
    except UserError as error:
        return str(error)
    save_checkpoint(Path(save), engine, groups, TrainState(step=STEPS, applied_steps=STEPS))
    return ""
