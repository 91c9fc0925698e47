"""Softmax attention of new tokens to the keys in a cache, which gives every sequence a slot of the same size."""

from itertools import pairwise
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .exact import Bias, exact_attention
from .upload import upload

MAX_DECODE_QUERIES = 16  # up to this many new tokens per sequence, one padded call serves all sequences


class DecodePlan(NamedTuple):
    """Which keys a few new tokens per sequence see, the same in all layers.

    B sequences, padded to R queries, the most new tokens of a sequence, and to S keys.
    """

    sequence: Tensor  # [T] the sequence of each token
    column: Tensor  # [T] its index among the R queries
    i: Tensor  # [B, R] the positions of the queries
    j: Tensor  # [B, S] the positions of the keys
    visible: Tensor  # [B, R, S] bool
    gathered: bool  # the S keys are the last ones of each sequence; else they are the first S of every slot


def plan_decode(
    starts: list[int],
    lengths: list[int],
    rows: Tensor,
    capacity: int,
    window: int | None,
) -> DecodePlan | None:
    """A plan from `cached_attention`'s arguments; None for more than MAX_DECODE_QUERIES new tokens in a sequence."""
    counts = [end - start for start, end in pairwise(starts)]
    most, longest = max(counts), max(n + count for n, count in zip(lengths, counts, strict=True))
    if most > MAX_DECODE_QUERIES:
        return None
    sequence, position = rows // capacity, rows % capacity
    # The new tokens of a sequence are its last ones, so they are aligned at the right; padding comes before.
    ends = position.new_zeros(len(counts)).scatter_reduce(0, sequence, position + 1, "amax")
    i = ends[:, None] - most + torch.arange(most, device=rows.device)
    column = position - ends[sequence] + most
    gathered = window is not None and window + most - 1 < longest
    if window is not None and gathered:
        j = ends[:, None] - (window + most - 1) + torch.arange(window + most - 1, device=rows.device)
    else:
        j = torch.arange(longest, device=rows.device).expand(len(counts), -1)
    distance = i[:, :, None] - j[:, None, :]
    visible = (distance >= 0) & (j >= 0)[:, None]
    if window is not None:
        visible &= distance < window
    visible[..., 0] |= ~visible.any(-1)  # padding that sees no key would be NaN
    return DecodePlan(sequence, column, i, j, visible, gathered)


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
    """o_i = Σ_j softmax_j(scale · q_i·k_j + bias_ij) v_j over i − window < j ≤ i, positions in a sequence.

    q [T, N, H]: the new tokens of B sequences; those of sequence b are starts[b] to starts[b + 1] − 1.
    k, v [B · capacity, K, H]: the cache, which has the new keys already.
    lengths: of each sequence, in tokens, without its new ones. rows [T] int64: the index of each new token in the
        cache, b · capacity + position. capacity: tokens per slot.
    window: None for all j ≤ i. scale: None for 1/√H. bias: see `Bias`.
    plan: what `plan_decode` returns for these arguments, so that layers can share it; None: it is called here.

    Returns o [T, N, H] in the dtype of q. For inference only.
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
    """k, v [B, capacity, K, H]. Pads the queries to R per sequence, and reads only the keys that one of them sees."""
    num_sequences, most, num_keys = plan.visible.shape
    num_kv_heads, group = k.shape[2], q.shape[1] // k.shape[2]
    padded = q.new_zeros(num_sequences, most, *q.shape[1:])
    padded[plan.sequence, plan.column] = q
    if plan.gathered:
        batch = torch.arange(num_sequences, device=q.device)[:, None]
        k, v = k[batch, plan.j.clamp(min=0)], v[batch, plan.j.clamp(min=0)]
    else:
        k, v = k[:, :num_keys], v[:, :num_keys]
    # The query heads of a group become queries of their key head, so that its keys are read once.
    # [B, K, G, R, S]
    mask = plan.visible[:, None, None].expand(-1, num_kv_heads, group, -1, -1)
    if bias is not None:
        added = bias(plan.i, plan.j).unflatten(1, (num_kv_heads, group))
        mask = added.masked_fill(~mask, -torch.inf).to(q.dtype)
    # [B, K, G · R, H]
    queries = padded.unflatten(2, (num_kv_heads, group)).permute(0, 2, 3, 1, 4).flatten(2, 3)
    out = F.scaled_dot_product_attention(
        queries, k.transpose(1, 2), v.transpose(1, 2), attn_mask=mask.flatten(2, 3), scale=scale
    )
    # [B, R, N, H]
    out = out.unflatten(2, (group, most)).permute(0, 3, 1, 2, 4).flatten(2, 3)
    return out[plan.sequence, plan.column]


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
    """Many new tokens on a GPU: packs the keys in use, then runs FlashAttention aligned at the sequences' ends."""
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
