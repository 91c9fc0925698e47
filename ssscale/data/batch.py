"""Rows to the batch that a forward pass takes."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self

import numpy as np
import torch
from ssscale_kernels.buckets import bucket
from torch import Tensor

from ssscale.layout import PackedLayout
from ssscale.parallel.context import share_of
from ssscale.parallel.groups import Groups

IGNORE = -100  # the label of a position without target, as torch's cross entropy has it


class Row(NamedTuple):
    """A packed row as it lies in the shards: parts of documents, one behind the other.

    tokens: [length]; lengths, documents, offsets: [parts]. Part p is lengths[p] tokens of document documents[p] of its
    source from token offsets[p] on; an offset above 0 continues a document whose beginning lies in another row.
    """

    tokens: np.ndarray
    lengths: np.ndarray
    documents: np.ndarray
    offsets: np.ndarray


@dataclass(frozen=True)
class Batch:
    """A microbatch: `rows` packed rows of equal length, one behind the other, T tokens in all.

    tokens: [T] int64. labels: [T] int64, the next token of the same part, -100 at the last token of each.
    layout.cu_seqlens is padded with T to one of few sizes (`bucket`), so that few kernels and plans serve all batches;
    layout.max_seqlen is the row length always; layout.uniform_length is the row length where each row is one document.
    sources: [rows] int64, numbers of the rows' sources in `PackedData.names`. num_targets: labels that are not -100.
    rows: the tokens that have a target, int64, where they are few and the head computes no others.
    """

    tokens: Tensor
    labels: Tensor
    layout: PackedLayout
    sources: Tensor
    num_targets: int
    rows: Tensor | None = None

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Self:
        return type(self)(
            self.tokens.to(device, non_blocking=non_blocking),
            self.labels.to(device, non_blocking=non_blocking),
            self.layout.to(device, non_blocking=non_blocking),
            self.sources.to(device, non_blocking=non_blocking),
            self.num_targets,
            None if self.rows is None else self.rows.to(device, non_blocking=non_blocking),
        )

    def pin_memory(self) -> Self:
        """The same batch in page-locked memory (torch's DataLoader calls this)."""
        layout = self.layout
        pinned = PackedLayout(
            layout.cu_seqlens.pin_memory(), layout.positions.pin_memory(), layout.max_seqlen, layout.uniform_length
        )
        tensors = (self.tokens.pin_memory(), self.labels.pin_memory())
        rows = None if self.rows is None else self.rows.pin_memory()
        return type(self)(*tensors, pinned, self.sources.pin_memory(), self.num_targets, rows)


def take_share(batch: Batch, groups: Groups) -> Batch:
    """This rank's tokens of a batch that all ranks of its context group have read."""
    if groups.context_size == 1:
        return batch
    tokens, layout = share_of(batch.layout, len(batch.sources), groups)
    labels = batch.labels[tokens]
    num_targets = int((labels != IGNORE).sum())
    return Batch(batch.tokens[tokens], labels, layout, batch.sources, num_targets)


def collate(
    rows: Sequence[Row], sources: Sequence[int], one_document: bool = False, num_real: int | None = None
) -> Batch:
    """Rows of one length as a batch. one_document: a row counts as one document whatever lies in it.

    Rows from number `num_real` on only fill the batch up: they get no targets.
    """
    length = len(rows[0].tokens)
    tokens = np.concatenate([row.tokens for row in rows]).astype(np.int64)
    if one_document:
        lengths = np.full(len(rows), length, np.int64)
    else:
        lengths = np.concatenate([row.lengths for row in rows]).astype(np.int64)
    ends = np.cumsum(lengths)
    assert ends[-1] == len(tokens) == len(rows) * length, (ends[-1], len(tokens))
    labels = np.empty_like(tokens)
    labels[:-1] = tokens[1:]
    labels[ends - 1] = IGNORE
    real = len(tokens) if num_real is None else num_real * length
    labels[real:] = IGNORE
    num_targets = real - int((ends <= real).sum())
    positions = np.arange(len(tokens), dtype=np.int32) - np.repeat((ends - lengths).astype(np.int32), lengths)
    cu_seqlens = np.full(bucket(len(lengths) + 1), len(tokens), np.int32)
    cu_seqlens[0] = 0
    cu_seqlens[1 : len(ends) + 1] = ends
    uniform = length if len(lengths) == len(rows) else None
    layout = PackedLayout(torch.from_numpy(cu_seqlens), torch.from_numpy(positions), length, uniform)
    return Batch(
        torch.from_numpy(tokens),
        torch.from_numpy(labels),
        layout,
        torch.tensor(list(sources), dtype=torch.int64),
        num_targets,
    )


def sums_by_source(losses: Tensor, batch: Batch, num_sources: int) -> Tensor:
    """[2, sources] float64: a microbatch's losses and its target tokens, summed by the source of each row.

    losses: [T], zero where there is no target. Columns are those of `PackedData.names`.
    """
    rows = len(batch.sources)
    per_row = torch.stack(
        [losses.view(rows, -1).double().sum(1), (batch.labels != IGNORE).view(rows, -1).double().sum(1)]
    )
    # A product rather than index_add_, whose order of summation on a GPU changes from run to run.
    return per_row @ torch.nn.functional.one_hot(batch.sources, num_sources).double()


def sums_by_position(losses: Tensor, batch: Batch, length: int) -> Tensor:
    """[2, buckets] float64: losses and target tokens summed by position within the document: 0, 1, 2–3, 4–7, … length − 1."""
    pair = torch.stack([losses.double(), (batch.labels != IGNORE).double()])
    bucket = torch.frexp(batch.layout.positions.float()).exponent.long()  # the number of bits
    return pair @ torch.nn.functional.one_hot(bucket, (length - 1).bit_length() + 1).double()
