"""Softmax attention of new tokens to keys in a cache of equal slots."""

from itertools import pairwise
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .exact import Bias, exact_attention
from .upload import upload

MAX_DECODE_QUERIES = 16  # up to this many new tokens a sequence, all sequences are one padded call


class DecodePlan(NamedTuple):
    """What a few new tokens a sequence see; the same in all layers. R: the most of a sequence; S: the keys that are read.

    sequence, slot: [T], each token's place in the padded [B, R]. i: [B, R], j: [B, S], positions. visible: [B, R, S].
    gathered: S are the last ones of each sequence, else the first ones of all.
    """

    sequence: Tensor
    slot: Tensor
    i: Tensor
    j: Tensor
    visible: Tensor
    gathered: bool


def plan_decode(
    starts: list[int], lengths: list[int], rows: Tensor, capacity: int, window: int | None
) -> DecodePlan | None:
    """From `cached_attention`'s arguments; None where a sequence has too many new tokens."""
    counts = [end - start for start, end in pairwise(starts)]
    most, longest = max(counts), max(n + count for n, count in zip(lengths, counts, strict=True))
    if most > MAX_DECODE_QUERIES:
        return None
    sequence, position = rows // capacity, rows % capacity
    # Each sequence's new tokens are its last ones: aligned at the right end, padding in front at positions below them.
    ends = position.new_zeros(len(counts)).scatter_reduce(0, sequence, position + 1, "amax")
    i = ends[:, None] - most + torch.arange(most, device=rows.device)
    slot = position - ends[sequence] + most
    gathered = window is not None and window + most - 1 < longest
    if window is not None and gathered:
        j = ends[:, None] - (window + most - 1) + torch.arange(window + most - 1, device=rows.device)
    else:
        j = torch.arange(longest, device=rows.device).expand(len(counts), -1)
    distance = i[:, :, None] - j[:, None, :]
    visible = (distance >= 0) & (j >= 0)[:, None]
    if window is not None:
        visible &= distance < window
    visible[..., 0] |= ~visible.any(-1)  # padding queries see something, or they would be NaN
    return DecodePlan(sequence, slot, i, j, visible, gathered)


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
    plan: DecodePlan | None = None,
) -> Tensor:
    """o_i = Σ_j softmax_j(scale · q_i·k_j + bias_ij) v_j over i − window < j ≤ i, positions within a sequence.

    q: [T, N, H], the new tokens of B sequences, sequence b's from starts[b] to starts[b + 1]; lengths[b]: its tokens before
    them. k, v: [B · capacity, K, H], the cache, where the new keys are in place; rows: [T] int64, the row of each new token,
    b · capacity + position. plan: `plan_decode` of these, for layers to share. Inference only. Returns [T, N, H].
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    plan = plan or plan_decode(starts, lengths, rows, capacity, window)
    if plan is not None:
        return _decode(q, k.unflatten(0, (-1, capacity)), v.unflatten(0, (-1, capacity)), plan, scale, bias)
    counts = [end - start for start, end in pairwise(starts)]
    if bias is None and q.is_cuda and q.dtype in (torch.bfloat16, torch.float16):
        return _prefill(q, k, v, starts, lengths, counts, capacity, window, scale)
    slots = [b * capacity for b in range(len(counts))]
    return exact_attention(
        q, k, v, starts_q=starts, starts_k=slots, offsets=lengths, window=window, scale=scale, bias=bias
    )


def _decode(q: Tensor, k: Tensor, v: Tensor, plan: DecodePlan, scale: float, bias: Bias | None) -> Tensor:
    """k, v: [B, capacity, K, H]. Queries are padded to the most of a sequence; only the keys that one of them sees are read."""
    num_sequences, most, num_keys = plan.visible.shape
    num_kv_heads, group = k.shape[2], q.shape[1] // k.shape[2]
    padded = q.new_zeros(num_sequences, most, *q.shape[1:])
    padded[plan.sequence, plan.slot] = q
    if plan.gathered:
        batch = torch.arange(num_sequences, device=q.device)[:, None]
        k, v = k[batch, plan.j.clamp(min=0)], v[batch, plan.j.clamp(min=0)]
    else:
        k, v = k[:, :num_keys], v[:, :num_keys]
    # The heads of a group are queries of their key head, which is then read once.
    mask = plan.visible[:, None, None].expand(-1, num_kv_heads, group, -1, -1)
    if bias is not None:
        added = bias(plan.i, plan.j).unflatten(1, (num_kv_heads, group))
        mask = added.masked_fill(~mask, -torch.inf).to(q.dtype)
    queries = padded.unflatten(2, (num_kv_heads, group)).permute(0, 2, 3, 1, 4).flatten(2, 3)  # [B, K, G · R, H]
    out = F.scaled_dot_product_attention(
        queries, k.transpose(1, 2), v.transpose(1, 2), attn_mask=mask.flatten(2, 3), scale=scale
    )
    out = out.unflatten(2, (group, most)).permute(0, 3, 1, 2, 4).flatten(2, 3)  # [B, R, N, H]
    return out[plan.sequence, plan.slot]


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
