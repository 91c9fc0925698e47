"""The public function: checks, defaults, dispatch."""

import torch
from torch import Tensor

from ..softmax.interface import check
from . import ops


def rotary_attention(
    qkv: Tensor,
    num_heads: int,
    *,
    cu_seqlens: Tensor,
    max_seqlen: int,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    base: Tensor | None = None,
    s: Tensor | None = None,
    b: Tensor | None = None,
    uniform_length: int | None = None,
    scale: float | None = None,
    window: int | None = None,
    deterministic: bool | None = None,
    backend: str = "auto",
) -> Tensor:
    """o_i = Σ_{j ≤ i} softmax_j(scale · (s base_i + b) · R_i q_i · R_j k_j) v_j within each document

    Rotary positions R (arXiv:2104.09864) and, where `base` is given, Scalable-Softmax's factor (arXiv:2501.19399): base_i is
    ln n_i (Eq. 2, Eq. 4) or p_{n_i} (Eq. 3). Both are applied in float32 and rounded once.

    qkv [T, N + 2K, H]: the projection's output, q heads first, then those of k and of v; N = num_heads, a multiple of K.
        bfloat16, float16, float32 (float64 too on the CPU); any stride between tokens.
    cos, sin [T, H / 2]: of each token's angles; None: no rotation. H is even then.
    base [T] float32 (float64 with float64), s and b [N] of any floating dtype; s is needed with base, b may be None. All
        three, and qkv, are differentiable; gradients are the same bits from run to run, but for those of the attention
        kernel itself (see `deterministic`).
    The others are `softmax_attention`'s. Returns o [T, N, H]. Raises ValueError for what does not fit.
    """
    if qkv.dim() != 3 or num_heads < 1 or qkv.shape[1] <= num_heads or (qkv.shape[1] - num_heads) % 2:
        raise ValueError(
            f"qkv must be [T, N + 2K, H] with N = num_heads, got {tuple(qkv.shape)} for num_heads={num_heads}"
        )
    total, heads, head_dim = qkv.shape
    num_kv_heads = (heads - num_heads) // 2
    q, k, v = qkv.split((num_heads, num_kv_heads, num_kv_heads), 1)
    check(q, k, v, cu_seqlens, max_seqlen, uniform_length, window)
    if (cos is None) != (sin is None):
        raise ValueError("cos and sin must be given together")
    for name, table in (("cos", cos), ("sin", sin)):
        if table is not None and (head_dim % 2 or table.shape != (total, head_dim // 2)):
            raise ValueError(
                f"{name} must be [T, H / 2] with an even H, got {tuple(table.shape)} for {tuple(qkv.shape)}"
            )
    if (base is None) != (s is None) or (base is None and b is not None):
        raise ValueError("base and s must be given together, and b only with them")
    for name, value, size in (("base", base, total), ("s", s, num_heads), ("b", b, num_heads)):
        if value is not None and value.shape != (size,):
            raise ValueError(f"{name} must be [{size}], got {tuple(value.shape)}")
    if deterministic is None:
        deterministic = torch.are_deterministic_algorithms_enabled()
    scale = head_dim**-0.5 if scale is None else scale
    qkv = qkv if qkv.stride()[1:] == (head_dim, 1) else qkv.contiguous()
    documents = (cu_seqlens, num_heads, max_seqlen, uniform_length, scale, window, deterministic, backend)
    o, *_ = ops.forward_op(qkv, cos, sin, base, s, b, *documents)
    return o
