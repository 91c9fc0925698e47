"""Context parallelism: the ranks of a context group read the same rows, and each takes a share of the tokens.

A context group has ulysses · ring ranks. A ring of R ranks divides every row into 2R chunks, and rank r takes chunks r and
2R − 1 − r, so that under a causal mask all ranks have the same number of query-key pairs. The tokens of a ring rank are
divided again, in order, among the ranks of a Ulysses group. In attention these ranks exchange tokens for heads: each sees
all tokens of the group for its share of the heads (arXiv:2309.14509).
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ssscale.layout import Gathered, PackedLayout, RingChunks
from ssscale.parallel.groups import Groups
from ssscale.parallel.operators import all_to_all, uncompiled

SMALLEST_BUCKET = 16


def share_of(layout: PackedLayout, rows: int, groups: Groups) -> tuple[Tensor, PackedLayout]:
    """Returns the indices of this rank's tokens, int64 [T / context], and the layout of these tokens.

    layout: the documents of the T tokens of `rows` rows of equal length. All tensors are on the CPU.
    """
    length = len(layout.positions) // rows
    ring, rank = groups.ring_size, groups.ring_rank
    ring_tokens = torch.arange(rows * length).view(rows, length)
    seen = layout
    if ring > 1:
        size = length // (2 * ring)
        assert 2 * ring * size == length, (length, ring)
        ring_tokens = ring_tokens.view(rows, 2 * ring, size)[:, [rank, 2 * ring - 1 - rank]].flatten(1)
        seen = replace(_restrict(layout, ring_tokens, size), ring=_chunks(layout, rows, ring))
    if groups.ulysses_size == 1:
        return ring_tokens.flatten(), seen
    part = ring_tokens.shape[1] // groups.ulysses_size
    assert part * groups.ulysses_size == ring_tokens.shape[1], (length, groups.context_size)
    tokens = ring_tokens[:, groups.ulysses_rank * part : (groups.ulysses_rank + 1) * part]
    own = _restrict(layout, tokens, part)
    return tokens.flatten(), replace(own, gathered=Gathered(rows, seen))


def _restrict(layout: PackedLayout, tokens: Tensor, size: int) -> PackedLayout:
    """Returns the layout of the given tokens [rows, ...], in the order in which they are given.

    A document is cut at every multiple of `size` tokens.
    """
    flat = tokens.flatten()
    positions = layout.positions[flat]
    # Cut also where two chunks of one document are adjacent in the row: the ring computes attention between chunks.
    starts = (positions == 0) | (torch.arange(len(flat)) % size == 0)
    bounds = starts.nonzero().flatten().int()
    cu_seqlens = torch.full((max(SMALLEST_BUCKET, 1 << len(bounds).bit_length()),), len(flat), dtype=torch.int32)
    cu_seqlens[: len(bounds)] = bounds
    uniform = size if len(bounds) * size == len(flat) else None
    lengths = layout.cu_seqlens.diff()
    final = torch.zeros(len(cu_seqlens) - 1, dtype=torch.int32)
    final[: len(bounds)] = lengths.repeat_interleave(lengths)[flat[bounds]]
    return PackedLayout(cu_seqlens, positions, min(size, layout.max_seqlen), uniform, final_lengths=final)


def _chunks(layout: PackedLayout, rows: int, ring: int) -> RingChunks:
    positions = layout.positions.view(rows, 2 * ring, -1)
    size = positions.shape[2]
    first = positions == 0
    heads = torch.where(first.any(2), first.int().argmax(2), size)
    begins = torch.arange(2 * ring) * size - positions[:, :, 0]
    return RingChunks(size, *(tuple(map(tuple, x.tolist())) for x in (heads, begins)))


def tokens_to_heads(q: Tensor, k: Tensor, v: Tensor, rows: int, groups: Groups) -> tuple[Tensor, Tensor, Tensor]:
    """Exchanges heads for tokens within the Ulysses group (arXiv:2309.14509), with one all-to-all for q, k and v.

    q [T, N, H], k and v [T, K, H]: all heads of this rank's tokens, which belong to `rows` rows. U divides N and K.
    Returns q [T · U, N / U, H], k and v [T · U, K / U, H]: the tokens of all U ranks in the order of their rows, and this
    rank's heads. Rank u gets the u-th of U equal groups of heads.
    """
    found: tuple[Tensor, Tensor, Tensor] = _call(_tokens_to_heads, q, k, v, rows, groups)
    return found


def heads_to_tokens(o: Tensor, rows: int, groups: Groups) -> Tensor:
    """Returns o [T, N, H] from o [T · U, N / U, H]: the inverse of `tokens_to_heads`."""
    found: Tensor = _call(_heads_to_tokens, o, rows, groups)
    return found


def _call(function: Callable[..., Any], *arguments: Any) -> Any:
    """Calls a function, whose last argument is `Groups`, outside of compiled graphs unless they hold its exchange."""
    return function(*arguments) if arguments[-1].in_graph else uncompiled(function, *arguments)


def _tokens_to_heads(q: Tensor, k: Tensor, v: Tensor, rows: int, groups: Groups) -> tuple[Tensor, ...]:
    parts = [x.unflatten(1, (groups.ulysses_size, -1)) for x in (q, k, v)]
    heads = [part.shape[2] for part in parts]
    x = torch.cat(parts, 2)
    exchanged: Tensor = _gather(x, rows, groups) if groups.in_graph else _Exchange.apply(x, rows, groups, True)
    return exchanged.split(heads, 1)


def _heads_to_tokens(o: Tensor, rows: int, groups: Groups) -> Tensor:
    exchanged: Tensor = _scatter(o, rows, groups) if groups.in_graph else _Exchange.apply(o, rows, groups, False)
    return exchanged.flatten(1, 2)


class _Exchange(torch.autograd.Function):
    """x [T, U, h, H] → [T · U, h, H] if `gather`, else the inverse. Each is the gradient of the other."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: int, groups: Groups, gather: bool) -> Tensor:
        ctx.options = rows, groups, gather
        return (_gather if gather else _scatter)(x, rows, groups)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        rows, groups, gather = ctx.options
        return (_scatter if gather else _gather)(gradient, rows, groups), None, None, None


def _gather(x: Tensor, rows: int, groups: Groups) -> Tensor:
    found = _all_to_all(x.transpose(0, 1), groups)  # [U, T, h, H], the tokens of every rank
    return found.unflatten(1, (rows, -1)).transpose(0, 1).flatten(0, 2)


def _scatter(x: Tensor, rows: int, groups: Groups) -> Tensor:
    parts = x.unflatten(0, (rows, groups.ulysses_size, -1)).transpose(0, 1).flatten(1, 2)  # [U, T, h, H]
    return _all_to_all(parts, groups).transpose(0, 1)


def _all_to_all(x: Tensor, groups: Groups) -> Tensor:
    assert groups.ulysses_group is not None
    if groups.in_graph:
        return all_to_all(x, groups.ulysses_size, groups.ulysses_group.group_name)
    x = x.contiguous()
    found = torch.empty_like(x)
    dist.all_to_all_single(found, x, group=groups.ulysses_group)
    return found
