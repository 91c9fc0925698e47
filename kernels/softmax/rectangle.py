"""Attention of some queries to keys that all of them see: what a ring of ranks adds to each rank's own causal part.

The parts of one query's softmax are put together by their log-sum-exp; backward takes the o and lse of the whole.
"""

import torch
from torch import Tensor

from .backends import HALF, TILE_ELEMENTS, lse_dtype


def forward(q: Tensor, k: Tensor, v: Tensor, scale: float, deterministic: bool) -> tuple[Tensor, Tensor]:
    """q [T, N, H], k and v [S, K, H] → o [T, N, H] in q.dtype and lse [T, N], over all S keys, S ≥ 1."""
    if _flash(q):
        bounds = (_bounds(q), _bounds(k), len(q), len(k))
        o, lse, *_ = torch.ops.aten._flash_attention_forward(q, k, v, *bounds, 0.0, False, False, scale=scale)
        return o, lse.t().contiguous()
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    o, lse = torch.empty_like(q), q.new_empty(q.shape[:2], dtype=lse_dtype(q))
    for rows in _blocks(q, k):
        logits = _logits(q[rows], k, scale)
        lse[rows] = logits.logsumexp(-1).t()
        o[rows] = torch.einsum("nij,jnh->inh", (logits - lse[rows].t()[..., None]).exp(), v.to(lse.dtype)).to(o.dtype)
    return o, lse


def backward(
    grad_o: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, scale: float, deterministic: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk and dv of these keys; o [T, N, H] and lse [T, N] are those of all keys that the queries saw anywhere."""
    if _flash(q):
        return _flash_backward(grad_o, q, k, v, o, lse, scale, deterministic)
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


def _flash(q: Tensor) -> bool:
    return q.is_cuda and q.dtype in HALF and q.shape[2] % 8 == 0


def _bounds(x: Tensor) -> Tensor:
    return torch.arange(2, dtype=torch.int32, device=x.device) * len(x)


def _blocks(q: Tensor, k: Tensor) -> list[slice]:
    rows = max(1, TILE_ELEMENTS // (q.shape[1] * len(k)))
    return [slice(first, first + rows) for first in range(0, len(q), rows)]


def _logits(q: Tensor, k: Tensor, scale: float) -> Tensor:
    dtype = lse_dtype(q)
    return torch.einsum("inh,jnh->nij", q.to(dtype), k.to(dtype)) * scale


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
