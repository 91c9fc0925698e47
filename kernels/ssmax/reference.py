"""The definition in plain torch."""

from itertools import pairwise

import torch
from ssscale_kernels.rotation import rotate
from torch import Tensor


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
