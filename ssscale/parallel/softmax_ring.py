"""Softmax attention with keys and values that are passed round a ring of ranks (arXiv:2310.01889)."""

import functools
from typing import Any

import torch
from ssscale_kernels.graph_breaks import breaks_graph
from ssscale_kernels.softmax import backends, merge, rectangle
from ssscale_kernels.softmax.documents import Documents, Rectangles
from torch import Tensor

from ssscale.layout import PackedLayout, RingChunks
from ssscale.parallel.groups import Groups
from ssscale.parallel.transfer import RingShift


@breaks_graph  # Dynamo cannot trace communication between ranks
def ring_softmax(
    q: Tensor, k: Tensor, v: Tensor, layout: PackedLayout, groups: Groups, scale: float | None, backend: str = "auto"
) -> Tensor:
    """Causal softmax attention over whole documents, whose tokens are spread over a ring of ranks.

    o_i = Σ_j softmax_j(scale · q_i·k_j) v_j   over the keys j ≤ i of the document of i   (arXiv:2310.01889)

    q [T, N, H]; k, v [T, K, H]: the tokens of this rank of the ring. `layout.ring` says how documents cross the ranks.
    scale: 1/√H if None. backend: as in `Documents`. Returns o [T, N, H] in q.dtype.

    In step t rank r has the keys and values of rank r − t, while those of the next step are being sent. Two partial results
    (o₁, lse₁) and (o₂, lse₂) of a query merge into lse = ln(e^lse₁ + e^lse₂) and o = e^(lse₁ − lse) o₁ + e^(lse₂ − lse) o₂,
    in float32. The ring stops after the last step in which a document reaches from one rank to another.

    The whole ring is one autograd.Function. If each step were one, a rank whose queries use no keys of a step would leave
    the step out of its backward pass, and its neighbours would wait. Forward saves this rank's q, k, v, the merged o and
    lse. Backward passes keys and values round again. Their gradients, in float32, follow one step later, and the last
    transfer brings them to their own rank.
    """
    scale = q.shape[2] ** -0.5 if scale is None else scale
    deterministic = torch.are_deterministic_algorithms_enabled()
    found: Tensor = _SoftmaxRing.apply(q, k, v, layout, groups, scale, deterministic, backend)
    return found


@functools.lru_cache(maxsize=16)
def num_steps(ring: RingChunks, size: int) -> int:
    """Returns the last step in which any rank of a ring of `size` ranks needs the keys that it gets; 0 if there is none."""
    for step in range(size - 1, 0, -1):
        if any(rectangles(ring, rank, (rank - step) % size) for rank in range(size)):
            return step
    return 0


@functools.lru_cache(maxsize=64)
def rectangles(ring: RingChunks, rank: int, owner: int) -> Rectangles:
    """Returns which queries of `rank` attend to which keys of `owner` in earlier chunks, as one rectangle per row.

    Each query of a rectangle attends to all of its keys. One rectangle per row is enough: a rank's chunks r and 2R − 1 − r
    of a row are adjacent in its memory, and a document with tokens in both of them fills all chunks in between.

    If owner < rank, only the owner's first chunk comes before queries of this rank, and both chunks of queries may attend
    to it. If owner > rank, only the second chunk of queries attends to the owner's keys, which may lie in both of its
    chunks. If owner = rank, the second chunk attends to the first.
    """
    size, last = ring.size, len(ring.heads[0]) - 1
    parts = []
    for row, heads in enumerate(ring.heads):
        queries, keys = [], []
        for half, query_chunk in enumerate((rank, last - rank)):
            for key_half, key_chunk in enumerate((owner, last - owner)):
                count = ring.num_far_keys(row, query_chunk, key_chunk) if key_chunk < query_chunk else 0
                if count:
                    first, end = (2 * row + half) * size, (2 * row + key_half + 1) * size
                    queries += [first, first + heads[query_chunk]]
                    keys += [end - count, end]
        parts.append((min(queries), max(queries), min(keys), max(keys)) if queries else (0, 0, 0, 0))
    return Rectangles(tuple(parts), size * (1 + (owner < rank)), size * (1 + (owner > rank)))


class _SoftmaxRing(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        layout: PackedLayout,
        groups: Groups,
        scale: float,
        deterministic: bool,
        backend: str,
    ) -> Tensor:
        ring = layout.ring
        assert ring is not None
        rank, size = groups.ring_rank, groups.ring_size
        steps = num_steps(ring, size)
        q = q.contiguous()
        documents = Documents(
            layout.cu_seqlens,
            layout.max_seqlen,
            layout.uniform_length,
            scale,
            None,
            deterministic,
            backend,
            partial=True,
        )
        pair = torch.stack((k, v))
        for step in range(steps + 1):
            shift = RingShift(pair, groups) if step < steps else None
            if step == 0:
                first, first_lse = backends.forward(q, k, v, documents)
                o, lse = first.to(first_lse.dtype, copy=True), first_lse.clone()
            seen = rectangles(ring, rank, (rank - step) % size)
            if seen:
                merge.merge_(o, lse, *rectangle.forward(q, pair[0], pair[1], seen, scale, deterministic, backend))
            pair = shift.result() if shift else pair
        o = o.to(q.dtype)
        ctx.save_for_backward(q, k, v, o, lse)
        ctx.others = documents, ring, groups, steps
        return o

    @staticmethod
    def backward(ctx: Any, grad_o: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, o, lse = ctx.saved_tensors
        documents, ring, groups, steps = ctx.others
        rank, size = groups.ring_rank, groups.ring_size
        grad_o = grad_o.contiguous()
        pair = torch.stack((k, v))
        behind: RingShift | None = None
        for step in range(steps + 1):
            shift = RingShift(pair, groups) if step < steps else None
            d_pair = torch.zeros(pair.shape, dtype=lse.dtype, device=pair.device)
            if step == 0:
                dv = torch.empty_like(v, memory_format=torch.contiguous_format)
                dq, dk = backends.backward(grad_o, q, k, v, o, lse, documents, dv)
                dq = dq.to(lse.dtype)
                d_pair[0], d_pair[1] = dk, dv
            seen = rectangles(ring, rank, (rank - step) % size)
            if seen:
                options = seen, documents.scale, documents.deterministic, documents.backend
                parts = rectangle.backward(grad_o, q, pair[0], pair[1], o, lse, *options)
                for whole, part in zip((dq, *d_pair), parts, strict=True):
                    whole += part
            if behind is not None:
                d_pair += behind.result()
            behind = RingShift(d_pair, groups, 1 if step < steps else -steps)
            pair = shift.result() if shift else pair
        assert behind is not None
        dk, dv = behind.result()
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None, None, None, None, None
