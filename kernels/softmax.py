"""Causal softmax attention on packed documents, by the fastest kernel that torch ships for the machine.

Measured on one H200 at 4 × 24 × 4096 × 64 (forward / backward ms): cuDNN 0.50 / 1.38, FlashAttention-2 0.74 / 2.26,
torch's varlen_attn (FlashAttention-2 on ragged documents) 0.78 / 2.12.
"""

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from .exact import exact_attention


def choose_backend(device: torch.device, dtype: torch.dtype, uniform: bool, window: int | None = None) -> str:
    """Which kernel `softmax_attention` runs: `cudnn`, `varlen` (FlashAttention-2, ragged documents), `sdpa` or `exact`.

    uniform: all documents of a batch have one length. window: a sliding one.
    """
    if device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16):
        return "sdpa" if window is None else "exact"
    if not uniform or window is not None:
        return "varlen"
    return "cudnn" if torch.cuda.get_device_capability(device) >= (9, 0) else "sdpa"


def softmax_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    cu_seqlens: Tensor,
    max_seqlen: int,
    uniform_length: int | None = None,
    window: int | None = None,
    scale: float | None = None,
) -> Tensor:
    """o_i = Σ_{j ≤ i} softmax_j(scale · q_i·k_j) v_j within each document (arXiv:1706.03762, Eq. 1, causal).

    q: [T, N, H]; k, v: [T, K, H] with N a multiple of K. cu_seqlens: [num_documents + 1] int32 from 0 to T.
    uniform_length: the documents' length where all have one. window: only the keys i − window < j. scale: 1 / sqrt(H)
    where None. Returns [T, N, H].
    """
    window = None if window is None or window >= max_seqlen else window
    backend = choose_backend(q.device, q.dtype, uniform_length is not None, window)
    if backend == "exact":
        bounds = cu_seqlens.tolist()
        return exact_attention(q, k, v, starts_q=bounds, starts_k=bounds, window=window, scale=scale)
    repeats = q.shape[1] // k.shape[1]
    if repeats > 1:
        k, v = k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
    if backend == "varlen":
        from torch.nn.attention.varlen import varlen_attn

        reach = (-1 if window is None else window - 1, 0)
        return varlen_attn(q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, scale=scale, window_size=reach)
    if uniform_length is None:
        bounds = cu_seqlens.tolist()
        parts = [_dense(q[a:b], k[a:b], v[a:b], b - a, scale, backend) for a, b in pairwise(bounds) if b > a]
        return torch.cat(parts)
    return _dense(q, k, v, uniform_length, scale, backend)


def _dense(q: Tensor, k: Tensor, v: Tensor, length: int, scale: float | None, backend: str) -> Tensor:
    """Documents of one length: [B · length, N, H] seen as [B, N, length, H]."""
    q, k, v = (t.unflatten(0, (-1, length)).transpose(1, 2) for t in (q, k, v))
    if backend == "cudnn":
        # The operator itself, so that what runs does not depend on which backends torch has been told to prefer.
        out = torch.ops.aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, True, False, scale=scale)[0]
    else:
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)
    return out.transpose(1, 2).flatten(0, 1)
