"""The CPU implementation: exact, vectorised over heads and equally long sequences, and chunked over queries."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

# Limit for the elements of a [batch, heads, queries, keys] temporary.
TILE_ELEMENTS = 1 << 20


class Tile(NamedTuple):
    """Queries `row..row+num_rows` of `batch` equally long sequences, and the keys that any of them attends to."""

    batch: int
    row: int
    num_rows: int
    key: int
    num_keys: int
    stride_q: int
    stride_k: int
    position: int

    def rows(self, x: Tensor) -> Tensor:
        """Returns a view [batch, num_rows, ...] of x [T, ...]."""
        return _windows(x, self.row, self.num_rows, self.batch, self.stride_q)

    def keys(self, x: Tensor) -> Tensor:
        return _windows(x, self.key, self.num_keys, self.batch, self.stride_k)


def _windows(x: Tensor, start: int, length: int, batch: int, stride: int) -> Tensor:
    shape, strides = x.shape[1:], x.stride()
    return x.as_strided(
        (batch, length, *shape), (stride * strides[0], *strides), x.storage_offset() + start * strides[0]
    )


def _tiles(starts_q: list[int], starts_k: list[int], offsets: list[int], num_heads: int) -> Iterator[Tile]:
    lengths = [(starts_q[i + 1] - starts_q[i], starts_k[i + 1] - starts_k[i], offsets[i]) for i in range(len(offsets))]
    # Equal sequences are batched, as many as keep the temporaries near the cache.
    uniform = len(set(lengths)) == 1
    rows, keys, _ = lengths[0] if uniform else (1, 1, 0)
    step = max(1, TILE_ELEMENTS // max(1, num_heads * rows * keys)) if uniform else 1
    for first in range(0, len(lengths), step):
        batch = min(step, len(lengths) - first)
        num_rows, num_keys, offset = lengths[first]
        chunk = max(1, TILE_ELEMENTS // max(1, batch * num_heads * num_keys))
        for row in range(0, num_rows, chunk):
            rows = min(chunk, num_rows - row)
            visible = min(max(offset + row + rows - 1, 0), num_keys)
            yield Tile(batch, starts_q[first] + row, rows, starts_k[first], visible, num_rows, num_keys, offset + row)


def _weights(
    q: Tensor, k: Tensor, position: int, log_rest_in: Tensor | None, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns weights [B, K, G, C, S], log_rest [B, K, G, C] and logits. q: [B, K, G, C, H], k: [B, K, 1, S, H]."""
    z = scale * (q @ k.transpose(-1, -2))
    num_rows, num_keys = z.shape[-2:]
    visible = torch.ones(num_rows, num_keys, dtype=torch.bool, device=z.device).tril(position - 1)
    z = z.masked_fill(~visible, -torch.inf)
    # There is one more column than keys: the sum for the nearest key is 0, and the last column is log_rest.
    suffix = z.new_zeros(*z.shape[:-1], num_keys + 1)
    torch.cumsum(logsigmoid(-z).flip(-1), -1, out=suffix[..., 1:])
    if log_rest_in is not None:
        suffix += log_rest_in[..., None]
    weights = (logsigmoid(z) + suffix[..., :-1].flip(-1)).exp()
    return weights, suffix[..., -1], z


def _compute_dtype(q: Tensor) -> torch.dtype:
    return torch.float64 if q.dtype == torch.float64 else torch.float32


def _grouped(x: Tensor, num_kv_heads: int) -> Tensor:
    """[B, C, N, ...] → [B, K, G, C, ...]"""
    x = x.unflatten(2, (num_kv_heads, -1))
    return x.permute(0, 2, 3, 1, *range(4, x.dim()))


def _ungrouped(x: Tensor) -> Tensor:
    """[B, K, G, C, ...] → [B, C, N, ...]"""
    return x.permute(0, 3, 1, 2, *range(4, x.dim())).flatten(2, 3)


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_rest_in: Tensor | None,
    starts_q: list[int],
    starts_k: list[int],
    offsets: list[int],
    scale: float,
) -> tuple[Tensor, Tensor]:
    dtype = _compute_dtype(q)
    o = torch.zeros(q.shape, dtype=q.dtype, device=q.device)
    log_rest = torch.zeros(q.shape[:2], dtype=dtype, device=q.device)
    for tile in _tiles(starts_q, starts_k, offsets, q.shape[1]):
        q_t = _grouped(tile.rows(q), k.shape[1]).to(dtype)
        k_t, v_t = (tile.keys(x).transpose(1, 2)[:, :, None].to(dtype) for x in (k, v))
        entering = None if log_rest_in is None else _grouped(tile.rows(log_rest_in), k.shape[1]).to(dtype)
        weights, rest, _ = _weights(q_t, k_t, tile.position, entering, scale)
        tile.rows(o).copy_(_ungrouped(weights @ v_t))
        tile.rows(log_rest).copy_(_ungrouped(rest))
    return o, log_rest


def backward(
    grad_o: Tensor,
    grad_log_rest: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_rest_in: Tensor | None,
    starts_q: list[int],
    starts_k: list[int],
    offsets: list[int],
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """dz_i = g_i − β_i (d_log_rest + Σ_{i' ≤ i} g_i') with g_i = A_i (dO·v_i); d_log_rest_in = d_log_rest + Σ g"""
    dtype = _compute_dtype(q)
    num_kv_heads = k.shape[1]
    dq = torch.zeros(q.shape, dtype=q.dtype, device=q.device)
    dk, dv = (torch.zeros(x.shape, dtype=dtype, device=x.device) for x in (k, v))
    d_entering = torch.zeros(q.shape[:2], dtype=dtype, device=q.device)
    for tile in _tiles(starts_q, starts_k, offsets, q.shape[1]):
        q_t, do_t = (_grouped(tile.rows(x), num_kv_heads).to(dtype) for x in (q, grad_o))
        k_t, v_t = (tile.keys(x).transpose(1, 2)[:, :, None].to(dtype) for x in (k, v))
        entering = None if log_rest_in is None else _grouped(tile.rows(log_rest_in), num_kv_heads).to(dtype)
        weights, _, z = _weights(q_t, k_t, tile.position, entering, scale)
        # The sums start at the far end, where they are exact zeros beyond a spent stick. In the other direction they
        # would cancel.
        behind = z.new_zeros(*z.shape[:-1], z.shape[-1] + 1)
        if grad_log_rest is not None:
            behind[..., 0] = _grouped(tile.rows(grad_log_rest), num_kv_heads)
        g = behind[..., 1:]
        g.copy_(weights * (do_t @ v_t.transpose(-1, -2)))
        dz = g.clone()
        behind = behind.cumsum(-1)
        dz -= z.sigmoid() * behind[..., 1:]
        tile.rows(d_entering).copy_(_ungrouped(behind[..., -1]))
        tile.rows(dq).copy_(_ungrouped(scale * (dz @ k_t)))
        tile.keys(dk).add_(scale * (dz.transpose(-1, -2) @ q_t).sum(2).transpose(1, 2))
        tile.keys(dv).add_((weights.transpose(-1, -2) @ do_t).sum(2).transpose(1, 2))
    return dq, dk.to(k.dtype), dv.to(v.dtype), d_entering
