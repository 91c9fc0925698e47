"""Makes batches for the forward pass from packed rows."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self

import numpy as np
import torch
from ssscale_kernels.buckets import bucket
from torch import Tensor

from ssscale.layout import IGNORE, PackedLayout
from ssscale.parallel.context import share_of
from ssscale.parallel.groups import Groups


class Row(NamedTuple):
    """A packed row as stored in the shards: consecutive pieces of documents.

    tokens: [length], uint16 or uint32. lengths (int32), documents and offsets (int64): one entry per piece.
    Piece p is lengths[p] tokens of document documents[p] of the row's source, from token offsets[p] of the document on. An
    offset above 0 means that the document begins in another row.
    """

    tokens: np.ndarray
    lengths: np.ndarray
    documents: np.ndarray
    offsets: np.ndarray


@dataclass(frozen=True)
class Batch:
    """A microbatch of consecutive packed rows of equal length, T tokens in all.

    tokens: [T] int64. labels: [T] int64, the next token of the same document; −100 (IGNORE) where there is none.
    layout: of these tokens. cu_seqlens is padded with T to one of a few sizes (`bucket`), so that a few kernels and cuDNN
        plans serve all batches. max_seqlen is always the row length. uniform_length is the row length if each row is one
        document, else None.
    sources: [number of rows] int64, index of each row's source in `PackedData.names`.
    num_targets: number of labels that are not −100.
    rows: int64 indices of the tokens with a target if they are few; the head then computes only these. Else None.
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
        """Returns the same batch in page-locked memory, from which copies to a GPU run in the background."""
        layout = self.layout
        pinned = PackedLayout(
            _pinned(layout.cu_seqlens), _pinned(layout.positions), layout.max_seqlen, layout.uniform_length
        )
        rows = None if self.rows is None else _pinned(self.rows)
        return type(self)(
            _pinned(self.tokens), _pinned(self.labels), pinned, _pinned(self.sources), self.num_targets, rows
        )


def _pinned(x: Tensor) -> Tensor:
    """Copies with NumPy, in one thread. torch divides copies of 32,768 elements among threads, and waking these takes
    longer than the copy (docs/log/2026-11-24-cpu-threads.md)."""
    out = torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
    np.copyto(out.numpy(), x.numpy())
    return out


def take_share(batch: Batch, groups: Groups) -> Batch:
    """Returns this rank's tokens of a batch that all ranks of its context group have read."""
    if groups.context_size == 1:
        return batch
    tokens, layout = share_of(batch.layout, len(batch.sources), groups)
    labels = batch.labels[tokens]
    num_targets = int((labels != IGNORE).sum())
    return Batch(batch.tokens[tokens], labels, layout, batch.sources, num_targets)


def collate(
    rows: Sequence[Row], sources: Sequence[int], one_document: bool = False, num_real: int | None = None
) -> Batch:
    """Joins rows of equal length into a batch.

    sources: index of each row's source. one_document: treat each row as one document whatever it contains.
    num_real: rows from this index on are padding and get no targets. None: there is no padding.
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
    """Returns the sums of a microbatch's losses and of its target tokens for each source, [2, num_sources] float64.

    losses: [T] in nats, 0 for tokens without target. Column i belongs to source i of `PackedData.names`.
    """
    rows = len(batch.sources)
    per_row = torch.stack(
        [losses.view(rows, -1).double().sum(1), (batch.labels != IGNORE).view(rows, -1).double().sum(1)]
    )
    # A matrix product is deterministic. On a GPU the order of summation of index_add_ changes from run to run.
    return per_row @ torch.nn.functional.one_hot(batch.sources, num_sources).double()


def sums_by_position(losses: Tensor, batch: Batch, length: int) -> Tensor:
    """Returns the sums of losses and of target tokens by position within the document, [2, num_buckets] float64.

    losses: [T] in nats, 0 for tokens without target. length: tokens per row. The buckets are positions 0, 1, 2–3, 4–7, …
    up to the one that holds length − 1.
    """
    pair = torch.stack([losses.double(), (batch.labels != IGNORE).double()])
    bucket = torch.frexp(batch.layout.positions.float()).exponent.long()  # the number of bits
    return pair @ torch.nn.functional.one_hot(bucket, (length - 1).bit_length() + 1).double()
