"""Stick-breaking attention with keys and values that are passed from rank to rank, the nearest first."""

import functools
import math
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from ssscale_kernels.graph_breaks import breaks_graph
from ssscale_kernels.stickbreaking import ops
from ssscale_kernels.upload import upload
from torch import Tensor

from ssscale.layout import PackedLayout, RingChunks
from ssscale.parallel.groups import Groups
from ssscale.parallel.transfer import LineShift


@breaks_graph  # Dynamo cannot trace communication between ranks
def ring_stickbreaking(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: PackedLayout,
    groups: Groups,
    scale: float | None,
    skip_below: float,
) -> tuple[Tensor, Tensor]:
    """`stickbreaking_attention` over whole documents, whose tokens are spread over a ring of ranks (arXiv:2410.17980).

    q [T, N, H]; k, v [T, K, H]: the tokens of this rank of the ring. `layout.ring` says how documents cross the ranks.
    scale: 1/√H if None. Returns o [T, N, H] in q.dtype and log_rest [T, N] in float32 (float64 for float64).

    In step δ the queries of chunk i attend to the keys of chunk i − δ, for all chunks at once. Each step moves every chunk
    of keys by one place along a line of 2R places, which goes up the ranks and down again. So a query takes its keys from
    near to far, and the log of what is left of its stick enters the next step as `log_rest_in`: the results (o₁, a₁) and
    (o₂, a₂) of consecutive steps combine into (o₁ + e^a₁ o₂, a₁ + a₂).

    The line ends after the last step that a document spans. With skip_below > 0 a rank leaves out a `Part` if all
    its queries have spent their sticks, and the line ends when no rank has a `Part` left. Whether step δ + 1 is needed is
    known after step δ, so from the second step on a transfer waits for that decision. With skip_below = 0 every transfer
    overlaps the step before it.

    The whole line is one autograd.Function, for the reason given in `ring_softmax`. Backward must go from far to near,
    because the gradient of a step's `log_rest_in` is the gradient of the nearer step's `log_rest`. It starts with the keys
    that forward ended with and moves them back. Their gradients, in float32, move with them to their own rank.
    """
    scale = q.shape[2] ** -0.5 if scale is None else scale
    found: tuple[Tensor, Tensor] = _StickBreakingRing.apply(q, k, v, layout, groups, scale, skip_below)
    return found


@functools.lru_cache(maxsize=16)
def num_steps(ring: RingChunks) -> int:
    """Returns the largest distance, in chunks, from a token to the beginning of its document."""
    reach = [
        chunk - row_begins[chunk] // ring.size
        for row_heads, row_begins in zip(ring.heads, ring.begins, strict=True)
        for chunk in range(len(row_heads))
        if row_heads[chunk]
    ]
    return max(reach, default=0)


class Part(NamedTuple):
    """Queries of a rank and the keys that they all attend to.

    rows: the queries among the rank's tokens. place: whether the keys lie in the chunks at the rank's first (0) or second
    (1) place of the line. row: the row of that chunk. keys: the keys among the chunk's tokens.
    """

    rows: slice
    place: int
    row: int
    keys: slice


def parts(ring: RingChunks, rank: int, step: int) -> list[Part]:
    """Returns the queries and keys of a rank in a step of the line, at most one `Part` per place and row."""
    found = []
    for row in range(len(ring.heads)):
        for place, chunk in enumerate((rank, len(ring.heads[row]) - 1 - rank)):
            count = ring.num_far_keys(row, chunk, chunk - step) if step <= chunk else 0
            if count:
                first = (2 * row + place) * ring.size
                rows = slice(first, first + ring.heads[row][chunk])
                found.append(Part(rows, place, row, slice(ring.size - count, ring.size)))
    return found


class _StickBreakingRing(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        layout: PackedLayout,
        groups: Groups,
        scale: float,
        skip_below: float,
    ) -> tuple[Tensor, Tensor]:
        ring = layout.ring
        assert ring is not None
        cu, longest = layout.cu_seqlens, layout.max_seqlen
        steps = num_steps(ring)
        places = _places(k, v, ring)
        shift = LineShift(places, groups) if steps else None
        near, near_rest, *aux = ops.forward_op(q, k, v, cu, cu, None, None, longest, longest, scale, skip_below)
        o, log_rest = near.to(near_rest.dtype, copy=True), near_rest.clone()
        saved, done = aux, {}
        for step in range(1, steps + 1):
            todo = parts(ring, groups.ring_rank, step)
            if skip_below > 0:
                todo, anyone = _unspent(todo, log_rest, skip_below, groups)
                if not anyone:
                    steps = step - 1
                    break
            if shift is None:
                shift = LineShift(places, groups)
            places = shift.result()
            ahead = skip_below == 0 and step < steps
            shift = LineShift(places, groups) if ahead else None
            if not todo:
                continue
            entering = torch.cat(_queries(log_rest, todo))
            found, rest, *aux = ops.forward_op(
                _joined(_queries(q, todo)), *_keys(places, todo), *_bounds(todo, q.device), entering, *_longest(todo),
                scale, skip_below,
            )  # fmt: skip
            _add(_queries(o, todo), found)
            _set(_queries(log_rest, todo), rest)
            done[step] = todo
            saved += [entering, *aux]
        if shift is not None:  # was still under way when the line ended
            shift.wait()
        ctx.save_for_backward(q, k, v, cu, *places, *saved)
        ctx.others = groups, longest, (scale, skip_below), steps, done
        return o.to(q.dtype), log_rest

    @staticmethod
    def backward(ctx: Any, grad_o: Tensor, grad_log_rest: Tensor | None) -> tuple[Tensor | None, ...]:
        groups, longest, options, steps, done = ctx.others
        q, k, v, cu, first, second, *saved = ctx.saved_tensors
        aux, saved = saved[: ops.NUM_AUX], saved[ops.NUM_AUX :]
        kept = 1 + ops.NUM_AUX
        wide = torch.promote_types(q.dtype, torch.float32)
        places = (first, second)
        grad_o = grad_o.contiguous()
        d_rest = q.new_zeros(q.shape[:2], dtype=wide) if grad_log_rest is None else grad_log_rest.clone()
        dq = torch.zeros(q.shape, dtype=wide, device=q.device)
        behind = None
        for step in range(steps, 0, -1):
            shift = LineShift(places, groups, back=True) if step > 1 else None
            d_places = tuple(torch.zeros(x.shape, dtype=wide, device=x.device) for x in places)
            todo = done.get(step)
            if todo:
                entering, *part_aux = saved[-kept:]
                del saved[-kept:]
                dq_part, dk_part, dv_part, d_entering = ops.backward_op(
                    _joined(_queries(grad_o, todo)), torch.cat(_queries(d_rest, todo)), _joined(_queries(q, todo)),
                    *_keys(places, todo), *_bounds(todo, q.device), entering, *part_aux, *_longest(todo), *options,
                )  # fmt: skip
                _add(_queries(dq, todo), dq_part)
                _set(_queries(d_rest, todo), d_entering)
                for number, d_keys in enumerate((dk_part, dv_part)):
                    _add([d_places[part.place][number, part.row, part.keys] for part in todo], d_keys)
            if behind is not None:
                for mine, theirs in zip(d_places, behind.result(), strict=True):
                    mine += theirs
            behind = LineShift((d_places[0], d_places[1]), groups, back=True)
            places = shift.result() if shift else places
        near = grad_o, d_rest, q, k, v, cu, cu, None, None
        dq_near, dk, dv, _ = ops.backward_op(*near, *aux, longest, longest, *options)
        dq += dq_near
        if behind is not None:
            far = torch.stack(behind.result(), 2).flatten(1, 3)  # [2, rows · 2 · size, K, H]
            dk, dv = dk + far[0], dv + far[1]
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), *(None,) * 4


def _places(k: Tensor, v: Tensor, ring: RingChunks) -> tuple[Tensor, Tensor]:
    """Returns k and v of the rank's first and of its second chunks, each [2 (k, v), rows, size, K, H]."""
    pair = torch.stack((k, v)).unflatten(1, (-1, 2, ring.size))
    return pair[:, :, 0].contiguous(), pair[:, :, 1].contiguous()


def _queries(x: Tensor, todo: list[Part]) -> list[Tensor]:
    return [x[part.rows] for part in todo]


def _keys(places: tuple[Tensor, Tensor], todo: list[Part]) -> tuple[Tensor, Tensor]:
    """Returns the concatenated k and v of the parts."""
    pairs = [places[part.place][:, part.row, part.keys] for part in todo]
    k, v = pairs[0] if len(pairs) == 1 else torch.cat(pairs, 1)
    return k, v


def _joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _add(parts: list[Tensor], found: Tensor) -> None:
    """Adds to each part its piece of `found`, with one kernel."""
    torch._foreach_add_(parts, found.to(parts[0].dtype).split([len(part) for part in parts]))


def _set(parts: list[Tensor], found: Tensor) -> None:
    torch._foreach_copy_(parts, found.split([len(part) for part in parts]))


def _sizes(todo: list[Part]) -> tuple[list[int], list[int]]:
    """Returns the numbers of queries and of keys of each part."""
    slices = [[part.rows for part in todo], [part.keys for part in todo]]
    num_queries, num_keys = ([each.stop - each.start for each in some] for some in slices)
    return num_queries, num_keys


def _longest(todo: list[Part]) -> tuple[int, int]:
    num_queries, num_keys = _sizes(todo)
    return max(num_queries), max(num_keys)


def _bounds(todo: list[Part], device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Returns cu_seqlens of the queries and keys, and query offsets that put all keys of a part before its first query."""
    sizes = torch.tensor(_sizes(todo), dtype=torch.int32)
    cu_q, cu_k = torch.nn.functional.pad(sizes.cumsum(1, dtype=torch.int32), (1, 0))
    return upload(cu_q, device), upload(cu_k, device), upload(sizes[1], device)


def _unspent(todo: list[Part], log_rest: Tensor, skip_below: float, groups: Groups) -> tuple[list[Part], bool]:
    """Returns the parts with a query whose stick is not spent, and whether any rank of the ring has such a part."""
    left = [log_rest[part.rows].max() for part in todo]
    most = torch.stack([*left, log_rest.new_full((), -math.inf)]).float()
    most[-1] = most.max()
    dist.all_reduce(most[-1:], dist.ReduceOp.MAX, group=groups.ring_group)
    *own, anyone = (most >= math.log(skip_below)).tolist()
    return [part for part, unspent in zip(todo, own, strict=True) if unspent], anyone
