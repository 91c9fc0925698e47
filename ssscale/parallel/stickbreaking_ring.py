"""Stick-breaking attention over keys and values that pass along the sequence, the nearest first."""

import functools
import math
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from ssscale_kernels.stickbreaking import ops
from ssscale_kernels.upload import upload
from torch import Tensor

from ssscale.layout import PackedLayout, RingChunks
from ssscale.parallel.groups import Groups
from ssscale.parallel.transfer import LineShift


@torch.compiler.disable  # a compiled block's graph breaks here: Dynamo cannot trace what waits for other ranks
def ring_stickbreaking(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: PackedLayout,
    groups: Groups,
    scale: float | None,
    skip_below: float,
) -> tuple[Tensor, Tensor]:
    """`stickbreaking_attention` over the keys of the whole document, of which this rank has a part: o and log_rest.

    q [T, N, H]; k, v [T, K, H] of the ring rank's tokens (`layout.ring` says which).

    In step δ the queries of chunk i meet the keys of chunk i − δ, for all chunks at once: every chunk of keys moves one place
    along the line of 2R places that goes up the ranks and down again. Each query so takes its keys near to far, and what is
    left of its stick enters the next step (`log_rest_in`): the merge (o₁ + e^a₁ o₂, a₁ + a₂) in its order. The line ends
    with the last step that a document reaches over. Under skip_below > 0 a rank leaves out the parts whose queries have all
    spent their sticks, and when no rank has any left the line ends: the verdict on step δ + 1 is known after step δ, so from
    the second step on a transfer waits for it. With skip_below = 0 nothing is asked, and every transfer runs beside the
    step before it.

    One autograd.Function holds the whole line, for the reason given in `ring_softmax`. Backward must go far to near: the
    gradient of what a step was left with is that of what the step before it left over. It begins with the keys that forward
    ended with and runs the line backwards; the gradients of keys and values, in float32, go with them and arrive at home.
    """
    scale = q.shape[2] ** -0.5 if scale is None else scale
    found: tuple[Tensor, Tensor] = _StickBreakingRing.apply(q, k, v, layout, groups, scale, skip_below)
    return found


@functools.lru_cache(maxsize=16)
def num_steps(ring: RingChunks) -> int:
    """How many chunks the farthest-reaching document lies apart from its beginning."""
    reach = [
        chunk - row_begins[chunk] // ring.size
        for row_heads, row_begins in zip(ring.heads, ring.begins, strict=True)
        for chunk in range(len(row_heads))
        if row_heads[chunk]
    ]
    return max(reach, default=0)


class Part(NamedTuple):
    """Tokens `rows` of a rank see tokens `keys` of the chunks of one row in the rank's first (0) or second (1) place."""

    rows: slice
    place: int
    row: int
    keys: slice


def parts(ring: RingChunks, rank: int, step: int) -> list[Part]:
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
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, layout: PackedLayout, groups: Groups, scale: float, skip_below: float
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
        if shift is not None:  # under way when the line ended
            shift.wait()
        ctx.save_for_backward(q, k, v, cu, *places, *saved)
        ctx.others = groups, longest, scale, steps, done
        return o.to(q.dtype), log_rest

    @staticmethod
    def backward(ctx: Any, grad_o: Tensor, grad_log_rest: Tensor | None) -> tuple[Tensor | None, ...]:
        groups, longest, scale, steps, done = ctx.others
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
                    *_keys(places, todo), *_bounds(todo, q.device), entering, *part_aux, *_longest(todo), scale,
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
        dq_near, dk, dv, _ = ops.backward_op(grad_o, d_rest, q, k, v, cu, cu, None, None, *aux, longest, longest, scale)
        dq += dq_near
        if behind is not None:
            far = torch.stack(behind.result(), 2).flatten(1, 3)  # [2, rows · 2 · size, K, H]
            dk, dv = dk + far[0], dv + far[1]
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None, None, None, None


def _places(k: Tensor, v: Tensor, ring: RingChunks) -> tuple[Tensor, Tensor]:
    """[2 (k, v), rows, size, K, H] of the rank's two chunks of each row."""
    pair = torch.stack((k, v)).unflatten(1, (-1, 2, ring.size))
    return pair[:, :, 0].contiguous(), pair[:, :, 1].contiguous()


def _queries(x: Tensor, todo: list[Part]) -> list[Tensor]:
    return [x[part.rows] for part in todo]


def _keys(places: tuple[Tensor, Tensor], todo: list[Part]) -> tuple[Tensor, Tensor]:
    """k and v of the parts, one behind the other."""
    pairs = [places[part.place][:, part.row, part.keys] for part in todo]
    k, v = pairs[0] if len(pairs) == 1 else torch.cat(pairs, 1)
    return k, v


def _joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _add(parts: list[Tensor], found: Tensor) -> None:
    """Adds to each part its piece of `found`, in one kernel."""
    torch._foreach_add_(parts, found.to(parts[0].dtype).split([len(part) for part in parts]))


def _set(parts: list[Tensor], found: Tensor) -> None:
    torch._foreach_copy_(parts, found.split([len(part) for part in parts]))


def _sizes(todo: list[Part]) -> tuple[list[int], list[int]]:
    """How many queries and keys each part has."""
    slices = [[part.rows for part in todo], [part.keys for part in todo]]
    num_queries, num_keys = ([each.stop - each.start for each in some] for some in slices)
    return num_queries, num_keys


def _longest(todo: list[Part]) -> tuple[int, int]:
    num_queries, num_keys = _sizes(todo)
    return max(num_queries), max(num_keys)


def _bounds(todo: list[Part], device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """cu_seqlens of the queries and of the keys, and the offsets that put all keys of a part before its first query."""
    sizes = torch.tensor(_sizes(todo), dtype=torch.int32)
    cu_q, cu_k = torch.nn.functional.pad(sizes.cumsum(1, dtype=torch.int32), (1, 0))
    return upload(cu_q, device), upload(cu_k, device), upload(sizes[1], device)


def _unspent(todo: list[Part], log_rest: Tensor, skip_below: float, groups: Groups) -> tuple[list[Part], bool]:
    """The parts with a query whose stick is not spent, and whether any rank of the ring has one."""
    left = [log_rest[part.rows].max() for part in todo]
    most = torch.stack([*left, log_rest.new_full((), -math.inf)]).float()
    most[-1] = most.max()
    dist.all_reduce(most[-1:], dist.ReduceOp.MAX, group=groups.ring_group)
    *own, anyone = (most >= math.log(skip_below)).tolist()
    return [part for part, unspent in zip(todo, own, strict=True) if unspent], anyone
