"""Softmax attention in plain torch, exact on every device, for the cases that no fused kernel takes.

`exact_attention` takes position biases and cached keys, and autograd differentiates it. The operators of softmax/ run
`forward` and `backward` where no kernel takes the dtype, the head dim or the window. All compute one block of queries
at a time, so that memory holds about TILE_ELEMENTS logits.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

TILE_ELEMENTS = 1 << 22  # elements of a temporary [N, queries, keys]

# bias(i [Q], j [S]) → [N, Q, S], added to the scaled logits of queries at positions i and keys at positions j ≤ i.
Bias = Callable[[Tensor, Tensor], Tensor]


def lse_dtype(q: Tensor) -> torch.dtype:
    """The dtype of the computation: float64 for float64, else float32."""
    return torch.float64 if q.dtype == torch.float64 else torch.float32


def causal_logits(
    q: Tensor,
    k: Tensor,
    scale: float,
    i: Tensor,
    j: Tensor,
    window: int | None,
    bias: Bias | None = None,
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

    q [B, N, L, H]; k, v [B, N, S, H]. causal: query i sees keys i − window < j ≤ i, and S is L; else all keys.
    No autograd.
    """
    o, lse = torch.empty_like(q), q.new_empty(q.shape[:3], dtype=lse_dtype(q))
    for queries, keys in _blocks(q, k, causal, window):
        # [B, N, queries, keys]
        logits = _block_logits(q, k, scale, queries, keys, causal, window)
        lse[:, :, queries] = logits.logsumexp(-1)
        o[:, :, queries] = torch.exp(logits - lse[:, :, queries, None]) @ v[:, :, keys].to(lse.dtype)
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
    """dq, dk and dv [B, N, L or S, H] in the dtype of lse; o and lse are what `forward` returned.

    partial: o and lse are over more keys than these k and v. No autograd.
    """
    grad, query, key, value = (x.to(lse.dtype) for x in (grad_o, q, k, v))
    dq, dk, dv = (torch.zeros_like(x) for x in (query, key, value))
    for queries, keys in _blocks(q, k, causal, window):
        # [B, N, queries, keys]
        logits = _block_logits(q, k, scale, queries, keys, causal, window)
        weights = torch.exp(logits - lse[:, :, queries, None])
        d_weights = grad[:, :, queries] @ value[:, :, keys].transpose(-1, -2)
        # Softmax's backward subtracts Σ_j p_j dp_j over all keys. It equals dO·o but for the rounding of o, so dO·o
        # serves only where some of the keys are missing here.
        product = grad[:, :, queries] * o[:, :, queries].to(lse.dtype) if partial else weights * d_weights
        d_logits = weights * (d_weights - product.sum(-1, keepdim=True)) * scale
        dq[:, :, queries] = d_logits @ key[:, :, keys]
        dk[:, :, keys] += d_logits.transpose(-1, -2) @ query[:, :, queries]
        dv[:, :, keys] += weights.transpose(-1, -2) @ grad[:, :, queries]
    return dq, dk, dv


def _blocks(q: Tensor, k: Tensor, causal: bool, window: int | None) -> Iterator[tuple[slice, slice]]:
    """Blocks of queries, and the keys that they see, of about TILE_ELEMENTS logits each."""
    batch, heads, length, _ = q.shape
    rows = max(1, TILE_ELEMENTS // (batch * heads * k.shape[2]))
    for first in range(0, length, rows):
        last = min(first + rows, length)
        if causal:
            yield slice(first, last), slice(0 if window is None else max(0, first - window + 1), last)
        else:
            yield slice(first, last), slice(0, k.shape[2])


def _block_logits(
    q: Tensor,
    k: Tensor,
    scale: float,
    queries: slice,
    keys: slice,
    causal: bool,
    window: int | None,
) -> Tensor:
    q, k = q[:, :, queries], k[:, :, keys]
    if not causal:
        return _logits(q, k, scale)
    i, j = (torch.arange(span.start, span.stop, device=q.device) for span in (queries, keys))
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
    """o_i = Σ_j softmax_j(scale · q_i·k_j + bias_ij) v_j over i − window < j ≤ i, positions in a sequence.

    q [T, N, H]; k, v [S, K, H] with N a multiple of K. Sequence b has the queries starts_q[b] to starts_q[b + 1] − 1,
    at the positions from offsets[b] on (None: from 0 on), and the keys from starts_k[b] on, at the positions from 0 on.
    window: None for all j ≤ i. scale: None for 1/√H. bias: see `Bias`. Computes in float32 (float64 for float64).
    Returns o [T, N, H] in the dtype of q.
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
    """The most queries r, from 1 to `rows`, with heads · r · (reach + r) logits within TILE_ELEMENTS."""
    budget = TILE_ELEMENTS / heads
    return max(1, min(rows, int((-reach + (reach * reach + 4 * budget) ** 0.5) / 2)))


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    i: Tensor,
    j: Tensor,
    window: int | None,
    scale: float,
    bias: Bias | None,
) -> Tensor:
    """q [Q, N, H] at positions i [Q], and k, v [S, K, H] at positions j [S] → o [Q, N, H]."""
    repeats = q.shape[1] // k.shape[1]
    k, v = (x.to(lse_dtype(q)).repeat_interleave(repeats, 1).transpose(0, 1) for x in (k, v))
    weights = causal_logits(q.transpose(0, 1), k, scale, i, j, window, bias).softmax(-1)
    return (weights @ v).transpose(0, 1).to(q.dtype)
