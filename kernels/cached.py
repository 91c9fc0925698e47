"""Softmax attention of new tokens to keys in a cache of equal slots."""

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from .exact import Bias, exact_attention
from .upload import upload

MAX_DECODE_QUERIES = 16  # up to this many new tokens a sequence, all sequences are one padded call


def cached_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    starts: list[int],
    lengths: list[int],
    rows: Tensor,
    capacity: int,
    window: int | None = None,
    scale: float | None = None,
    bias: Bias | None = None,
) -> Tensor:
    """o_i = Σ_j softmax_j(scale · q_i·k_j + bias_ij) v_j over i − window < j ≤ i, positions within a sequence.

    q: [T, N, H], the new tokens of B sequences, sequence b's from starts[b] to starts[b + 1]; lengths[b]: its tokens before
    them. k, v: [B · capacity, K, H], the cache, where the new keys are in place; rows: [T] int64, the row of each new token,
    b · capacity + position. Inference only. Returns [T, N, H].
    """
    counts = [end - start for start, end in pairwise(starts)]
    longest = max(n + count for n, count in zip(lengths, counts, strict=True))
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    if max(counts) <= MAX_DECODE_QUERIES:
        k, v = (x.unflatten(0, (-1, capacity)) for x in (k, v))
        return _decode(q, k, v, counts, rows, capacity, longest, window, scale, bias)
    if bias is None and q.is_cuda and q.dtype in (torch.bfloat16, torch.float16):
        return _prefill(q, k, v, starts, lengths, counts, capacity, window, scale)
    slots = [b * capacity for b in range(len(counts))]
    return exact_attention(
        q, k, v, starts_q=starts, starts_k=slots, offsets=lengths, window=window, scale=scale, bias=bias
    )


def _decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    counts: list[int],
    rows: Tensor,
    capacity: int,
    longest: int,
    window: int | None,
    scale: float,
    bias: Bias | None,
) -> Tensor:
    """k, v: [B, capacity, K, H]. Queries are padded to the most of a sequence; only the keys that one of them sees are read."""
    num_sequences, most = len(counts), max(counts)
    num_kv_heads, group = k.shape[2], q.shape[1] // k.shape[2]
    sequence, position = rows // capacity, rows % capacity
    # Each sequence's new tokens are its last ones: aligned at the right end, padding in front at positions below them.
    ends = position.new_zeros(num_sequences).scatter_reduce(0, sequence, position + 1, "amax")
    i = ends[:, None] - most + torch.arange(most, device=q.device)  # [B, R]
    slot = position - ends[sequence] + most
    padded = q.new_zeros(num_sequences, most, *q.shape[1:])
    padded[sequence, slot] = q
    if window is not None and window + most - 1 < longest:
        j = ends[:, None] - (window + most - 1) + torch.arange(window + most - 1, device=q.device)  # [B, S]
        batch = torch.arange(num_sequences, device=q.device)[:, None]
        k, v = k[batch, j.clamp(min=0)], v[batch, j.clamp(min=0)]
    else:
        j = torch.arange(longest, device=q.device).expand(num_sequences, -1)
        k, v = k[:, :longest], v[:, :longest]
    distance = i[:, :, None] - j[:, None, :]
    visible = (distance >= 0) & (j >= 0)[:, None]
    if window is not None:
        visible &= distance < window
    visible[..., 0] |= ~visible.any(-1)  # padding queries see something, or they would be NaN
    # The heads of a group are queries of their key head, which is then read once.
    mask = visible[:, None, None].expand(-1, num_kv_heads, group, -1, -1)
    if bias is not None:
        added = bias(i, j).unflatten(1, (num_kv_heads, group))
        mask = added.masked_fill(~mask, -torch.inf).to(q.dtype)
    queries = padded.unflatten(2, (num_kv_heads, group)).permute(0, 2, 3, 1, 4).flatten(2, 3)  # [B, K, G · R, H]
    out = F.scaled_dot_product_attention(
        queries, k.transpose(1, 2), v.transpose(1, 2), attn_mask=mask.flatten(2, 3), scale=scale
    )
    out = out.unflatten(2, (group, most)).permute(0, 3, 1, 2, 4).flatten(2, 3)  # [B, R, N, H]
    return out[sequence, slot]


def _prefill(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    starts: list[int],
    lengths: list[int],
    counts: list[int],
    capacity: int,
    window: int | None,
    scale: float,
) -> Tensor:
    """Many new tokens on a GPU: the keys without their slots' free ends, and FlashAttention aligned at the sequences' ends."""
    from torch.nn.attention.varlen import varlen_attn

    used = [n + count if count else 0 for n, count in zip(lengths, counts, strict=True)]
    total = sum(used)
    sizes = upload(torch.tensor(used, dtype=torch.int32), q.device)
    cu_q = upload(torch.tensor(starts, dtype=torch.int32), q.device)
    cu_k = F.pad(sizes.cumsum(0, dtype=torch.int32), (1, 0))
    slots = torch.arange(0, len(used) * capacity, capacity, device=q.device) - cu_k[:-1]
    rows = torch.arange(total, device=q.device) + slots.repeat_interleave(sizes, output_size=total)
    repeats = q.shape[1] // k.shape[1]
    k, v = k[rows], v[rows]
    if repeats > 1:
        k, v = k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
    reach = (-1 if window is None else window - 1, 0)
    return varlen_attn(q, k, v, cu_q, cu_k, max(counts), max(used), scale=scale, window_size=reach)
