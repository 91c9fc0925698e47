"""Attention of queries to keys that all of them see, which a ring of ranks adds to each rank's own causal attention.

The results of one query over different keys merge by their log-sum-exp (merge.py). Backward takes the o and lse over
all keys.
"""

import torch
from torch import Tensor

from .. import exact
from ..exact import lse_dtype
from . import backends, cudnn_graphs
from .documents import Rectangles


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rectangles: Rectangles,
    scale: float,
    deterministic: bool,
    wanted: str = "auto",
) -> tuple[Tensor, Tensor]:
    """o_i = Σ_j softmax_j(scale · q_i·k_j) v_j and lse_i = ln Σ_j exp(scale · q_i·k_j), j in the rectangle of i.

    q [T, N, H]; k, v [S, K, H]. deterministic, wanted: as `backends.choose_backend` takes them, which raises
    ValueError. Returns o [T, N, H] in the dtype of q and lse [T, N] float32 (float64 for float64). A query outside of
    all rectangles has an lse of −∞ and an undefined o.
    """
    o = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = q.new_full(q.shape[:2], -torch.inf, dtype=lse_dtype(q))
    backend = _choose(q, rectangles, deterministic, wanted)
    if backend == "cudnn":
        cudnn_graphs.rectangle_forward(q, k, v, o, lse, rectangles, scale)
        return o, lse
    run = _flash_forward if backend == "varlen" else _exact_forward
    for queries, keys in _not_empty(rectangles):
        o[queries], lse[queries] = run(q[queries], k[keys], v[keys], scale)
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
    """dq [T, N, H] and dk, dv [S, K, H] through the rectangles, 0 elsewhere.

    o [T, N, H] and lse [T, N]: over all keys that the queries see, inside of the rectangles and elsewhere.
    """
    dq, dk, dv = (torch.zeros(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    backend = _choose(q, rectangles, deterministic, wanted)
    if backend == "cudnn":
        cudnn_graphs.rectangle_backward(grad_o, q, k, v, o, lse, (dq, dk, dv), rectangles, scale)
        return dq, dk, dv
    for queries, keys in _not_empty(rectangles):
        tensors = (grad_o[queries], q[queries], k[keys], v[keys], o[queries], lse[queries])
        if backend == "varlen":
            dq[queries], dk[keys], dv[keys] = _flash_backward(*tensors, scale, deterministic)
        else:
            dq[queries], dk[keys], dv[keys] = _exact_backward(*tensors, scale)
    return dq, dk, dv


def _choose(q: Tensor, rectangles: Rectangles, deterministic: bool, wanted: str) -> str:
    """The choice for causal attention, of which `cpu` and `exact` both mean plain torch here."""
    longest = max(rectangles.max_queries, rectangles.max_keys)
    return backends.choose_backend(q.device, q.dtype, q.shape[2], longest, None, deterministic, wanted)


def _not_empty(rectangles: Rectangles) -> list[tuple[slice, slice]]:
    return [(i, j) for i, j in rectangles.slices() if i.start < i.stop and j.start < j.stop]


def _bounds(x: Tensor) -> Tensor:
    """cu_seqlens of one document that has all tokens of x."""
    return torch.arange(2, dtype=torch.int32, device=x.device) * len(x)


def _flash_forward(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    bounds = (_bounds(q), _bounds(k), len(q), len(k))
    o, lse, *_ = torch.ops.aten._flash_attention_forward(q, k, v, *bounds, 0.0, False, False, scale=scale)
    return o, lse.t()


def _flash_backward(
    grad_o: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    scale: float,
    deterministic: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    no_dropout = torch.zeros(2, dtype=torch.uint64, device=q.device)
    was, warned = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(deterministic)  # FlashAttention-2 reads this flag alone
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
    """[T, K, H] → [1, N, T, H]: each key head once for every query head that shares it."""
    return x.repeat_interleave(num_heads // x.shape[1], 1).transpose(0, 1)[None]


def _exact_forward(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    query, key, value = (_alone(x, q.shape[1]) for x in (q, k, v))
    o, lse = exact.forward(query, key, value, scale, causal=False)
    return o[0].transpose(0, 1), lse[0].t()


def _exact_backward(
    grad_o: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    grad, query, key, value, out = (_alone(x, q.shape[1]) for x in (grad_o, q, k, v, o))
    dq, dk, dv = exact.backward(grad, query, key, value, out, lse.t()[None], scale, causal=False, partial=True)
    dq, dk, dv = (x[0].unflatten(0, (y.shape[1], -1)).sum(1).transpose(0, 1) for x, y in ((dq, q), (dk, k), (dv, v)))
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)
