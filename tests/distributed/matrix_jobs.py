"""A job for the worker pool: three training steps under a layout, beside those that one process has saved."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ssscale.config.choices import Recompute, ShardWithin
from ssscale.config.schema import (
    Config,
    DataConfig,
    ModelConfig,
    ParallelConfig,
    TrainConfig,
    mixer_config,
    optimizer_config,
    position_config,
)
from ssscale.data.batch import Batch, take_share
from ssscale.engine.deepspeed import DeepSpeedEngine
from ssscale.layout import IGNORE, PackedLayout
from ssscale.model.decoder import Decoder
from ssscale.model.init import initialize_weights
from ssscale.model.mixers.ssmax import Variant
from ssscale.parallel.groups import Groups
from ssscale.train.checkpoint import CheckpointReader, TrainState, load_training_state, load_weights
from ssscale.train.checkpoint_folder import list_checkpoints
from ssscale.train.save import save_checkpoint
from tests.distributed.jobs import regroup
from tests.distributed.matrix import CONTEXT, Layout

# A small vocabulary, of which a quarter of the embedding still has more than the 100,000 elements up to which DeepSpeed's
# ZeRO-3 divides no weight, and no multiple of the ranks: the last one has padding.
VOCAB, ROWS, LENGTH, LR = 12_801, 8, 24, 0.003
# Of the rows of a step. Chunks have 12, 6 or 3 tokens: documents over all of them, over some, inside one, of one token, and
# some that begin or end where a chunk does.
DOCUMENTS = [[24], [5, 19], [1, 11, 12], [7, 1, 1, 15], [3, 3, 6, 12], [2, 20, 2], [1] * 24, [14, 10]]
# The labels of these rows begin so many tokens later: unequal numbers of targets a rank.
SILENT = {0: 3, 3: 17, 4: 9, 7: 22}

model = partial(
    ModelConfig, num_layers=2, hidden_size=32, ffn_hidden_size=48, num_heads=16, num_kv_heads=8, head_dim=4,
    vocab_size=VOCAB, init_std=0.1,
)  # fmt: skip
nope = position_config("nope")


def sticks(**options: bool) -> ModelConfig:
    mixer = mixer_config("stickbreaking", skip_below=0.0, remainder=options.pop("remainder", False))
    return model(mixers=["stickbreaking"], mixer=mixer, position=nope, **options)


MODELS = {
    "softmax": (model(), model(tie_embeddings=True, position=nope, qkv_bias=True, qk_norm=True)),
    "ssmax": (
        model(mixers=["ssmax"], tie_embeddings=True),
        model(mixers=["ssmax"], mixer=mixer_config("ssmax", variant=Variant.pn), qkv_bias=True),
    ),
    "stickbreaking": (
        sticks(remainder=True, qk_norm=True),
        sticks(tie_embeddings=True),
    ),
}


def make_batch(step: int, rows: range) -> Batch:
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(0, VOCAB, (ROWS, LENGTH), generator=generator)[rows.start : rows.stop].flatten()
    labels = tokens.roll(-1)
    for i, row in enumerate(rows):
        labels[i * LENGTH : i * LENGTH + SILENT.get(row, 0)] = IGNORE
    layout = PackedLayout.from_lengths([length for row in rows for length in DOCUMENTS[row]], LENGTH)
    labels[layout.cu_seqlens[1:].long() - 1] = IGNORE
    return Batch(tokens, labels, layout, torch.zeros(len(rows), dtype=torch.int64), int((labels != IGNORE).sum()))


def make_engine(
    layout: Layout,
    load: str | None = None,
    overlap: bool = False,
    dtype: torch.dtype = torch.float32,
    in_bf16: bool = False,
    within: int | ShardWithin = ShardWithin.all,
    copies: bool = False,
) -> tuple[DeepSpeedEngine, Groups]:
    ulysses, ring = CONTEXT[layout.context]
    groups = regroup(layout.tensor, ulysses, ring, within)
    config = Config(
        model=MODELS[layout.core][layout.variant],
        data=DataConfig(length=LENGTH),
        # Above the rounding of gradients that are zero (that of p_1, say): Adam would make whole steps of it.
        optimizer=replace(optimizer_config(eps=1e-6), clip=0.5),
        train=TrainConfig(batch_size=ROWS, microbatch=ROWS // layout.accumulation // groups.data_size),
        parallel=ParallelConfig(
            tensor=layout.tensor,
            sequence=layout.sequence,
            ulysses=ulysses,
            ring=ring,
            zero_stage=layout.zero,
            overlap=overlap,
            overlap_bf16=in_bf16,
            shard_within=within,
            copy_engines=copies,
        ),
    )
    recompute = Recompute(layout.recompute)
    decoder = Decoder(config.model, groups, LENGTH, dtype=dtype, sequence_parallel=layout.sequence, recompute=recompute)
    if load is None:
        initialize_weights(decoder, config.model, groups, seed=3)
        return DeepSpeedEngine(decoder, config, groups), groups
    reader = CheckpointReader(list_checkpoints(Path(load))[-1])
    load_weights(reader, decoder, groups)
    engine = DeepSpeedEngine(decoder, config, groups)
    load_training_state(reader, engine, groups)
    return engine, groups


def train_step(engine: DeepSpeedEngine, groups: Groups, step: int) -> tuple[float, float | None]:
    """(mean loss over the step's targets, gradient norm)."""
    share = ROWS // groups.data_size
    size = share // engine.accumulation
    num_targets = make_batch(step, range(ROWS)).num_targets
    total = torch.zeros((), dtype=torch.float64)
    for first in range(groups.data_rank * share, (groups.data_rank + 1) * share, size):
        batch = take_share(make_batch(step, range(first, first + size)), groups)
        total += engine.forward_backward(batch.tokens, batch.layout, batch.labels, num_targets).losses.double().sum()
    dist.all_reduce(total, group=groups.replica_group)
    return total.item() / num_targets, engine.step(LR).grad_norm


def train(
    layout: Layout,
    first: int = 0,
    steps: int = 3,
    load: str | None = None,
    save: str | None = None,
    at: tuple[int, ...] = (),
) -> dict[str, list[Any]]:
    """Losses and gradient norms; checkpoints in `save` after the steps named in `at`."""
    engine, groups = make_engine(layout, load)
    found: dict[str, list[Any]] = {"losses": [], "norms": []}
    for step in range(first, first + steps):
        loss, norm = train_step(engine, groups, step)
        found["losses"].append(loss)
        found["norms"].append(norm)
        if step + 1 in at:
            assert save is not None
            save_checkpoint(Path(save), engine, groups, TrainState(step=step + 1, applied_steps=step + 1))
    return found


def compare(layout: Layout, saved: str, overlap: bool = False) -> dict[str, Any]:
    """Losses and norms, and by weight how far this layout is from what one process has saved after steps 1 and 3.

    gradients: ‖g − g'‖ / ‖g'‖ of the first step's, as the optimizer got them (its first moment is a multiple).
    changes: ‖(w₃ − w₀) − (w'₃ − w'₀)‖ / ‖w'₃ − w'₀‖.
    """
    engine, groups = make_engine(layout, overlap=overlap)
    first, last = (CheckpointReader(path) for path in list_checkpoints(Path(saved)))
    begun = {(part.name, part.start): part.tensor.clone() for part in engine.fragments() if part.state == "weight"}
    found: dict[str, Any] = {"losses": [], "norms": []}
    for step in range(3):
        loss, norm = train_step(engine, groups, step)
        found["losses"].append(loss)
        found["norms"].append(norm)
        if step == 0:
            found["gradients"] = _errors(engine, groups, first, "exp_avg", {})
    found["changes"] = _errors(engine, groups, last, "weight", begun)
    return found


def _errors(
    engine: DeepSpeedEngine, groups: Groups, reader: CheckpointReader, state: str, begun: dict[tuple[str, int], Tensor]
) -> dict[str, float]:
    """By weight, over all copies and parts on all ranks."""
    weights = dict(engine.module.named_parameters())
    sums = {name: torch.zeros(2, dtype=torch.float64) for name in engine.names}
    for part in engine.fragments():
        if part.state == state:
            expected = reader.flat(part, weights[part.name], engine.local_shape(part.name), groups)
            change = expected - begun[part.name, part.start] if begun else expected
            squares = [x.double().square().sum() for x in (part.tensor - expected, change)]
            sums[part.name] += torch.stack(squares)
    every = torch.stack(list(sums.values()))
    dist.all_reduce(every)
    return dict(zip(sums, (every[:, 0] / every[:, 1]).sqrt().tolist(), strict=True))
