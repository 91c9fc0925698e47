"""The definition in plain torch."""

from itertools import pairwise

import torch
from torch import Tensor


def rotate(x: Tensor, cos: Tensor | None, sin: Tensor | None, factor: Tensor | None = None) -> Tensor:
    """Rotate the pairs (x_k, x_{k + H/2}) (the half-split form), times `factor`, in float32, rounded once.

    x: [T, N, H]; cos, sin: [T, H / 2], None for no rotation; factor: [T, N]. Returns [T, N, H] in x.dtype.
    """
    if cos is None and factor is None:
        return x
    wide = x if x.dtype == torch.float64 else x.float()
    if cos is not None and sin is not None:
        first, second = wide.chunk(2, -1)
        cos, sin = cos[:, None], sin[:, None]
        wide = torch.cat((first * cos - second * sin, second * cos + first * sin), -1)
    if factor is not None:
        wide = wide * factor[..., None]
    return wide.to(x.dtype)


def query_factor(base: Tensor | None, s: Tensor | None, b: Tensor | None) -> Tensor | None:
    """s · base + b in float32 (float64 for a float64 base): [T, N] from base [T], s [N] and b [N]."""
    if base is None:
        return None
    assert s is not None
    factor = base[:, None] * s.to(base.dtype)
    return factor if b is None else factor + b.to(base.dtype)


def rotary_attention_reference(
    qkv: Tensor,
    num_heads: int,
    *,
    cu_seqlens: Tensor,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    base: Tensor | None = None,
    s: Tensor | None = None,
    b: Tensor | None = None,
    scale: float | None = None,
    window: int | None = None,
) -> Tensor:
    """softmax((s · base + b) · scale · R_i q · R_j k) v, one document after the other; arguments as `rotary_attention`'s."""
    num_kv_heads = (qkv.shape[1] - num_heads) // 2
    q, k, v = qkv.split((num_heads, num_kv_heads, num_kv_heads), 1)
    q, k = rotate(q, cos, sin, query_factor(base, s, b)), rotate(k, cos, sin)
    k, v = (x.repeat_interleave(num_heads // num_kv_heads, 1) for x in (k, v))
    outs = []
    starts = cu_seqlens.tolist()
    for start, stop in pairwise(starts):
        wide = torch.float64 if qkv.dtype == torch.float64 else torch.float32
        query, key, value = (x[start:stop].transpose(0, 1).to(wide) for x in (q, k, v))
        logits = query @ key.transpose(1, 2) * (qkv.shape[2] ** -0.5 if scale is None else scale)
        distance = torch.arange(stop - start, device=qkv.device)[:, None] - torch.arange(
            stop - start, device=qkv.device
        )
        hidden = (distance < 0) | (distance >= (stop - start + 1 if window is None else window))
        outs.append((logits.masked_fill(hidden, float("-inf")).softmax(-1) @ value).transpose(0, 1).to(qkv.dtype))
    return torch.cat(outs)
