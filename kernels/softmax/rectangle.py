"""Attention of some queries to keys that all of them see: what a ring of ranks adds to each rank's own causal part.

The parts of one query's softmax are put together by their log-sum-exp (merge.py); backward takes the o and lse of the whole.
"""

import torch
from torch import Tensor

from .. import exact
from ..exact import lse_dtype
from . import backends, cudnn_graphs
from .documents import Rectangles


def forward(
    q: Tensor, k: Tensor, v: Tensor, rectangles: Rectangles, scale: float, deterministic: bool, wanted: str = "auto"
) -> tuple[Tensor, Tensor]:
    """q [T, N, H], k and v [S, K, H] → o [T, N, H] in q.dtype and lse [T, N], over the keys that the rectangles name.

    Queries of no rectangle have lse −∞ and an o of no meaning.
    """
    o, lse = (
        torch.empty(q.shape, dtype=q.dtype, device=q.device),
        q.new_full(q.shape[:2], -torch.inf, dtype=lse_dtype(q)),
    )
    backend = _choose(q, rectangles, deterministic, wanted)
    if backend == "cudnn":
        cudnn_graphs.rectangle_forward(q, k, v, o, lse, rectangles, scale)
        return o, lse
    run = _flash_forward if backend == "varlen" else _exact_forward
    for rows, keys in _parts(rectangles):
        o[rows], lse[rows] = run(q[rows], k[keys], v[keys], scale)
    return o, lse


def backward(
    grad_o: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    rectangles: Rectangles,
    scale: float,
    deterministic: bool,
    wanted: str = "auto",
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk and dv through the rectangles, 0 elsewhere; o and lse are those of all keys that the queries saw anywhere."""
    dq, dk, dv = (torch.zeros(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    backend = _choose(q, rectangles, deterministic, wanted)
    if backend == "cudnn":
        cudnn_graphs.rectangle_backward(grad_o, q, k, v, o, lse, (dq, dk, dv), rectangles, scale)
        return dq, dk, dv
    for rows, keys in _parts(rectangles):
        tensors = (grad_o[rows], q[rows], k[keys], v[keys], o[rows], lse[rows])
        if backend == "varlen":
            dq[rows], dk[keys], dv[keys] = _flash_backward(*tensors, scale, deterministic)
        else:
            dq[rows], dk[keys], dv[keys] = _exact_backward(*tensors, scale)
    return dq, dk, dv


def _choose(q: Tensor, rectangles: Rectangles, deterministic: bool, wanted: str) -> str:
    """As for causal attention; on the CPU plain torch."""
    longest = max(rectangles.max_queries, rectangles.max_keys)
    return backends.choose_backend(q.device, q.dtype, q.shape[2], longest, None, deterministic, wanted)


def _parts(rectangles: Rectangles) -> list[tuple[slice, slice]]:
    return [(rows, keys) for rows, keys in rectangles.slices() if rows.stop > rows.start and keys.stop > keys.start]


def _bounds(x: Tensor) -> Tensor:
    return torch.arange(2, dtype=torch.int32, device=x.device) * len(x)


def _flash_forward(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    bounds = (_bounds(q), _bounds(k), len(q), len(k))
    o, lse, *_ = torch.ops.aten._flash_attention_forward(q, k, v, *bounds, 0.0, False, False, scale=scale)
    return o, lse.t()


def _flash_backward(
    grad_o: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, scale: float, deterministic: bool
) -> tuple[Tensor, Tensor, Tensor]:
    no_dropout = torch.zeros(2, dtype=torch.uint64, device=q.device)
    was, warned = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(deterministic)  # all that FlashAttention-2 reads
    try:
        found: tuple[Tensor, Tensor, Tensor] = torch.ops.aten._flash_attention_backward(
            grad_o.contiguous(),
            q,
            k,
            v,
            o.contiguous(),
            lse.t().contiguous(),
            _bounds(q),
            _bounds(k),
            len(q),
            len(k),
            0.0,
            False,
            no_dropout,
            q.new_empty(0),
            scale=scale,
        )
    finally:
        torch.use_deterministic_algorithms(was, warn_only=warned)
    return found


def _alone(x: Tensor, num_heads: int) -> Tensor:
    """[T, K, H] → [1, N, T, H], key heads repeated for the query heads that share them."""
    return x.repeat_interleave(num_heads // x.shape[1], 1).transpose(0, 1)[None]


def _exact_forward(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    query, key, value = (_alone(x, q.shape[1]) for x in (q, k, v))
    o, lse = exact.forward(query, key, value, scale, causal=False)
    return o[0].transpose(0, 1), lse[0].t()


def _exact_backward(
    grad_o: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    grad, query, key, value, out = (_alone(x, q.shape[1]) for x in (grad_o, q, k, v, o))
    dq, dk, dv = exact.backward(grad, query, key, value, out, lse.t()[None], scale, causal=False, partial=True)
    dq, dk, dv = (x[0].unflatten(0, (y.shape[1], -1)).sum(1).transpose(0, 1) for x, y in ((dq, q), (dk, k), (dv, v)))
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)
