"""Computes the loss over the whole validation split, of the model and of a bigram on the same targets."""

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist

from eval.checkpoint.kneser_ney import DISCOUNT, MAX_TRAINING_TOKENS, KneserNeyBigram, target_pairs
from eval.checkpoint.progress import track
from ssscale.data.batch import Batch
from ssscale.data.stream import PackedData, valid_batches
from ssscale.model.decoder import Decoder

ROWS = 64  # rows per batch if no model limits them


@dataclass(frozen=True)
class Loss:
    """The mean loss over `targets` predicted tokens. bits_per_byte = nats_per_token / (ln 2 · bytes per target)."""

    nats_per_token: float
    bits_per_byte: float
    targets: int

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def num_rows(data: PackedData) -> int:
    """Return the number of rows of a split."""
    return sum(data.sources.values())


def all_batches(data: PackedData, one_document: bool, microbatch: int = ROWS) -> Iterator[Batch]:
    """Yield every row of a split once, with the same labels as in training."""
    return valid_batches(data, num_rows(data), microbatch, one_document=one_document)


def make_loss(total: float, targets: int, data: PackedData) -> Loss:
    """Return the mean loss. total: sum of the losses in nats over `targets` tokens."""
    nats = total / targets
    return Loss(nats, nats / (math.log(2) * data.bytes_per_target), targets)


@torch.no_grad()
def model_loss(model: Decoder, data: PackedData, microbatch: int, one_document: bool, show: bool = False) -> Loss:
    """Return the model's loss over every row of a split.

    A collective call: the rows are divided among the data-parallel ranks, and all ranks get the result.

    microbatch: rows per forward pass.
    one_document: every row is one document, as in training with the same setting.
    show: show progress.
    """
    groups = model.groups
    rows = num_rows(data)
    batches = valid_batches(data, rows, microbatch, groups.data_rank, groups.data_size, one_document)
    sums = torch.zeros(2, dtype=torch.float64, device=groups.device)
    steps = math.ceil(rows / (microbatch * groups.data_size))
    for batch in track(batches, "validation loss", steps, show):
        batch = batch.to(groups.device)
        losses = model(batch.tokens, batch.layout, batch.labels)
        sums[0] += losses.double().sum()
        sums[1] += batch.num_targets
    dist.all_reduce(sums, group=groups.replica_group)
    return make_loss(float(sums[0]), int(sums[1]), data)


def bigram_fits(train: PackedData) -> bool:
    """Return whether the training data has at most MAX_TRAINING_TOKENS tokens, so that the counts fit into memory."""
    return num_rows(train) * train.length <= MAX_TRAINING_TOKENS


def bigram_loss(train: PackedData, valid: PackedData, one_document: bool) -> Loss:
    """Return the loss of a Kneser–Ney bigram of all training rows, on the same targets as `model_loss`."""
    vocab_size = int(train.manifest["tokenizer"]["vocab_size"])
    model = KneserNeyBigram.train(target_pairs(all_batches(train, one_document)), vocab_size, DISCOUNT)
    pairs = target_pairs(all_batches(valid, one_document))
    return make_loss(model.loss(pairs) * len(pairs[0]), len(pairs[0]), valid)
