"""The definition of rotary attention with Scalable-Softmax in plain torch, which tests compare the kernels with."""

from itertools import pairwise

import torch
from ssscale_kernels.rotation import rotate
from torch import Tensor


def query_factor(log_n: Tensor | None, s: Tensor | None, b: Tensor | None) -> Tensor | None:
    """s · log_n + b (arXiv:2501.19399, Eq. 2 and 4), or None without log_n, which is plain softmax.

    log_n [T] float32 or float64, in whose dtype the result is; s and b [N] of any floating dtype, b may be None.
    Returns [T, N].
    """
    if log_n is None:
        return None
    assert s is not None
    factor = log_n[:, None] * s.to(log_n.dtype)
    return factor if b is None else factor + b.to(log_n.dtype)


def rotary_attention_reference(
    qkv: Tensor,
    num_heads: int,
    *,
    cu_seqlens: Tensor,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    log_n: Tensor | None = None,
    s: Tensor | None = None,
    b: Tensor | None = None,
    scale: float | None = None,
    window: int | None = None,
) -> Tensor:
    """o_i = Σ_{j ≤ i} softmax_j(scale · (s log_n_i + b) · R_i q_i · R_j k_j) v_j, one document after the other.

    The arguments are those of `rotary_attention`. Computes the softmax in float32 (float64 for float64) and builds
    the whole [N, length, length] of a document. Autograd differentiates it.
    """
    num_kv_heads = (qkv.shape[1] - num_heads) // 2
    q, k, v = qkv.split((num_heads, num_kv_heads, num_kv_heads), 1)
    q, k = rotate(q, cos, sin, query_factor(log_n, s, b)), rotate(k, cos, sin)
    k, v = (x.repeat_interleave(num_heads // num_kv_heads, 1) for x in (k, v))
    scale = qkv.shape[2] ** -0.5 if scale is None else scale
    wide = torch.float64 if qkv.dtype == torch.float64 else torch.float32
    outs = []
    for start, stop in pairwise(cu_seqlens.tolist()):
        # [N, length, H]
        query, key, value = (x[start:stop].transpose(0, 1).to(wide) for x in (q, k, v))
        # [N, length, length]
        logits = query @ key.transpose(1, 2) * scale
        index = torch.arange(stop - start, device=qkv.device)
        distance = index[:, None] - index
        hidden = (distance < 0) | (distance >= (stop - start + 1 if window is None else window))
        o = logits.masked_fill(hidden, float("-inf")).softmax(-1) @ value
        outs.append(o.transpose(0, 1).to(qkv.dtype))
    return torch.cat(outs)
