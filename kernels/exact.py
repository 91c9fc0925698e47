"""Softmax attention in plain torch, for what the fused kernels do not take: position biases on CPUs, cached keys.

Exact on every device. One document at a time, a block of queries at a time, so that about TILE_ELEMENTS scores live; the
backward pass of a document of several blocks computes each of them again.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

TILE_ELEMENTS = 1 << 22  # of a [N, queries, keys] temporary

# bias(i [Q], j [S]) → [N, Q, S], added to the scaled logits of queries at positions i and keys at positions j ≤ i.
Bias = Callable[[Tensor, Tensor], Tensor]


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
    dtype = torch.promote_types(q.dtype, torch.float32)
    repeats = q.shape[1] // k.shape[1]
    k, v = (x.to(dtype).repeat_interleave(repeats, 1) for x in (k, v))
    z = torch.einsum("inh,jnh->nij", q.to(dtype), k) * scale
    if bias is not None:
        z = z + bias(i, j)
    distance = i[:, None] - j
    hidden = distance < 0 if window is None else (distance < 0) | (distance >= window)
    weights = z.masked_fill(hidden, -torch.inf).softmax(-1)
    return torch.einsum("nij,jnh->inh", weights, v).to(q.dtype)
