"""Attention of some queries to keys that all of them see: what a ring of ranks adds to each rank's own causal part.

The parts of one query's softmax are put together by their log-sum-exp (merge.py); backward takes the o and lse of the whole.
"""

import torch
from torch import Tensor

from . import backends, cudnn_graphs
from .backends import TILE_ELEMENTS, lse_dtype
from .documents import Rectangles


def forward(
    q: Tensor, k: Tensor, v: Tensor, rectangles: Rectangles, scale: float, deterministic: bool
) -> tuple[Tensor, Tensor]:
    """q [T, N, H], k and v [S, K, H] → o [T, N, H] in q.dtype and lse [T, N], over the keys that the rectangles name.

    Queries of no rectangle have lse −∞ and an o of no meaning.
    """
    o, lse = (
        torch.empty(q.shape, dtype=q.dtype, device=q.device),
        q.new_full(q.shape[:2], -torch.inf, dtype=lse_dtype(q)),
    )
    backend = _choose(q, rectangles, deterministic)
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
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk and dv through the rectangles, 0 elsewhere; o and lse are those of all keys that the queries saw anywhere."""
    dq, dk, dv = (torch.zeros(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    backend = _choose(q, rectangles, deterministic)
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


def _choose(q: Tensor, rectangles: Rectangles, deterministic: bool) -> str:
    """As for causal attention; on the CPU plain torch."""
    longest = max(rectangles.max_queries, rectangles.max_keys)
    return backends.choose_backend(q.device, q.dtype, q.shape[2], longest, None, deterministic)


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


def _blocks(q: Tensor, k: Tensor) -> list[slice]:
    rows = max(1, TILE_ELEMENTS // (q.shape[1] * len(k)))
    return [slice(first, first + rows) for first in range(0, len(q), rows)]


def _logits(q: Tensor, k: Tensor, scale: float) -> Tensor:
    dtype = lse_dtype(q)
    return torch.einsum("inh,jnh->nij", q.to(dtype), k.to(dtype)) * scale


def _exact_forward(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    o, lse = torch.empty_like(q), q.new_empty(q.shape[:2], dtype=lse_dtype(q))
    for rows in _blocks(q, k):
        logits = _logits(q[rows], k, scale)
        lse[rows] = logits.logsumexp(-1).t()
        o[rows] = torch.einsum("nij,jnh->inh", (logits - lse[rows].t()[..., None]).exp(), v.to(lse.dtype)).to(o.dtype)
    return o, lse


def _exact_backward(
    grad_o: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    group = q.shape[1] // k.shape[1]
    wide = lse_dtype(q)
    key, value = (x.repeat_interleave(group, 1).to(wide) for x in (k, v))
    dq = torch.empty(q.shape, dtype=wide, device=q.device)
    dk, dv = torch.zeros_like(key), torch.zeros_like(value)
    for rows in _blocks(q, key):
        grad = grad_o[rows].to(wide)
        weights = (_logits(q[rows], key, scale) - lse[rows].t()[..., None]).exp()
        delta = (grad * o[rows].to(wide)).sum(-1).t()  # Σ_j p_j dp_j over all keys, here and elsewhere
        d_logits = weights * (torch.einsum("inh,jnh->nij", grad, value) - delta[..., None]) * scale
        dq[rows] = torch.einsum("nij,jnh->inh", d_logits, key)
        dk += torch.einsum("nij,inh->jnh", d_logits, q[rows].to(wide))
        dv += torch.einsum("nij,inh->jnh", weights, grad)
    dk, dv = (x.unflatten(1, (-1, group)).sum(2) for x in (dk, dv))
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)
