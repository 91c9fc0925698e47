"""Softmax attention in plain torch, exact on every device: for what the fused kernels do not take.

`exact_attention` has position biases and cached keys, and autograd differentiates it. `forward` and `backward` are what the
operators of softmax/ run where no kernel takes a dtype, a head dim or a window. All compute one block of queries at a time, so
that about TILE_ELEMENTS logits are alive.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

TILE_ELEMENTS = 1 << 22  # of a [N, queries, keys] temporary

# bias(i [Q], j [S]) → [N, Q, S], added to the scaled logits of queries at positions i and keys at positions j ≤ i.
Bias = Callable[[Tensor, Tensor], Tensor]


def lse_dtype(q: Tensor) -> torch.dtype:
    """The dtype of the computation: float64 for float64, else float32."""
    return torch.float64 if q.dtype == torch.float64 else torch.float32


def causal_logits(
    q: Tensor, k: Tensor, scale: float, i: Tensor, j: Tensor, window: int | None, bias: Bias | None = None
) -> Tensor:
    """scale · q_i·k_j + bias_ij for i − window < j ≤ i, elsewhere −∞.

    q [..., Q, H] at positions i [Q], k [..., S, H] at positions j [S]. Returns [..., Q, S] in `lse_dtype`.
    """
    z = _logits(q, k, scale)
    if bias is not None:
        z = z + bias(i, j)
    distance = i[:, None] - j
    hidden = distance < 0 if window is None else (distance < 0) | (distance >= window)
    return z.masked_fill_(hidden, -torch.inf)


def _logits(q: Tensor, k: Tensor, scale: float) -> Tensor:
    dtype = lse_dtype(q)
    return q.to(dtype) @ k.to(dtype).transpose(-1, -2) * scale


def forward(
    q: Tensor, k: Tensor, v: Tensor, scale: float, *, causal: bool, window: int | None = None
) -> tuple[Tensor, Tensor]:
    """o [B, N, L, H] in q.dtype and lse_i = ln Σ_j exp(scale · q_i·k_j), [B, N, L] in `lse_dtype`.

    q [B, N, L, H]; k, v [B, N, S, H]. causal: query i sees keys i − window < j ≤ i, and S is L; else all keys. No autograd.
    """
    o, lse = torch.empty_like(q), q.new_empty(q.shape[:3], dtype=lse_dtype(q))
    for rows, keys in _blocks(q, k, causal, window):
        logits = _block_logits(q, k, scale, rows, keys, causal, window)
        lse[:, :, rows] = logits.logsumexp(-1)
        o[:, :, rows] = torch.exp(logits - lse[:, :, rows, None]) @ v[:, :, keys].to(lse.dtype)
    return o, lse


def backward(
    grad_o: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    scale: float,
    *,
    causal: bool,
    window: int | None = None,
    partial: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk and dv of `forward`, in the dtype of lse. partial: o and lse are of more keys than these k and v."""
    grad, query, key, value = (x.to(lse.dtype) for x in (grad_o, q, k, v))
    dq, dk, dv = (torch.zeros_like(x) for x in (query, key, value))
    for rows, keys in _blocks(q, k, causal, window):
        logits = _block_logits(q, k, scale, rows, keys, causal, window)
        weights = torch.exp(logits - lse[:, :, rows, None])
        d_weights = grad[:, :, rows] @ value[:, :, keys].transpose(-1, -2)
        # Σ_j p_j dp_j over all keys, which is dO·o but for the rounding of o.
        product = grad[:, :, rows] * o[:, :, rows].to(lse.dtype) if partial else weights * d_weights
        d_logits = weights * (d_weights - product.sum(-1, keepdim=True)) * scale
        dq[:, :, rows] = d_logits @ key[:, :, keys]
        dk[:, :, keys] += d_logits.transpose(-1, -2) @ query[:, :, rows]
        dv[:, :, keys] += weights.transpose(-1, -2) @ grad[:, :, rows]
    return dq, dk, dv


def _blocks(q: Tensor, k: Tensor, causal: bool, window: int | None) -> Iterator[tuple[slice, slice]]:
    """Blocks of queries, and the keys that they see, that keep about TILE_ELEMENTS logits alive."""
    batch, heads, length, _ = q.shape
    rows = max(1, TILE_ELEMENTS // (batch * heads * k.shape[2]))
    for first in range(0, length, rows):
        last = min(first + rows, length)
        if causal:
            yield slice(first, last), slice(0 if window is None else max(0, first - window + 1), last)
        else:
            yield slice(first, last), slice(0, k.shape[2])


def _block_logits(
    q: Tensor, k: Tensor, scale: float, rows: slice, keys: slice, causal: bool, window: int | None
) -> Tensor:
    q, k = q[:, :, rows], k[:, :, keys]
    if not causal:
        return _logits(q, k, scale)
    i, j = (torch.arange(part.start, part.stop, device=q.device) for part in (rows, keys))
    return causal_logits(q, k, scale, i, j, window)


def exact_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    starts_q: list[int],
    starts_k: list[int],
    offsets: list[int] | None = None,
    window: int | None = None,
    scale: float | None = None,
    bias: Bias | None = None,
) -> Tensor:
    """o_i = Σ_j softmax_j(scale · q_i·k_j + bias_ij) v_j over i − window < j ≤ i, positions within a sequence.

    q: [T, N, H]; k, v: [S, K, H] with N a multiple of K. Sequence b: queries starts_q[b] to starts_q[b + 1], at positions
    offsets[b] on (0 where None), keys from starts_k[b] on. scale: 1 / sqrt(H) where None. Computes in float32 (float64 for
    float64). Returns [T, N, H] in q.dtype.
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    outs = []
    for b in range(len(starts_q) - 1):
        offset = 0 if offsets is None else offsets[b]
        row, end = starts_q[b], starts_q[b + 1]
        while row < end:
            first = offset + row - starts_q[b]  # the position of the block's first query
            reach = first + 1 if window is None else min(first + 1, window)
            rows = _rows_that_fit(q.shape[1], reach, end - row)
            from_key, to_key = first + 1 - reach, first + rows
            i = torch.arange(first, to_key, device=q.device)
            j = torch.arange(from_key, to_key, device=q.device)
            keys = slice(starts_k[b] + from_key, starts_k[b] + to_key)
            block = (q[row : row + rows], k[keys], v[keys], i, j, window, scale, bias)
            if torch.is_grad_enabled() and rows < end - starts_q[b]:
                outs.append(checkpoint(_attend, *block, use_reentrant=False))
            else:
                outs.append(_attend(*block))
            row += rows
    return torch.cat(outs) if outs else torch.empty_like(q)


def _rows_that_fit(heads: int, reach: int, rows: int) -> int:
    """The most queries r with heads · r · (reach + r) scores within TILE_ELEMENTS, from 1 to `rows`."""
    budget = TILE_ELEMENTS / heads
    return max(1, min(rows, int((-reach + (reach * reach + 4 * budget) ** 0.5) / 2)))


def _attend(
    q: Tensor, k: Tensor, v: Tensor, i: Tensor, j: Tensor, window: int | None, scale: float, bias: Bias | None
) -> Tensor:
    """q [Q, N, H] and k, v [S, K, H] → [Q, N, H]"""
    repeats = q.shape[1] // k.shape[1]
    k, v = (x.to(lse_dtype(q)).repeat_interleave(repeats, 1).transpose(0, 1) for x in (k, v))
    weights = causal_logits(q.transpose(0, 1), k, scale, i, j, window, bias).softmax(-1)
    return (weights @ v).transpose(0, 1).to(q.dtype)
