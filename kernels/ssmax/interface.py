"""The public function: it checks its arguments, fills in the defaults and calls the operator."""

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
    log_n: Tensor | None = None,
    s: Tensor | None = None,
    b: Tensor | None = None,
    uniform_length: int | None = None,
    scale: float | None = None,
    window: int | None = None,
    deterministic: bool | None = None,
    backend: str = "auto",
) -> Tensor:
    """o_i = Σ_{j ≤ i} softmax_j(scale · (s log_n_i + b) · R_i q_i · R_j k_j) v_j within each document.

    R_i rotates by the angles of token i (RoPE, arXiv:2104.09864). Where `log_n` is given, q is multiplied by the
    factor of Scalable-Softmax (arXiv:2501.19399): log_n_i is ln n_i for the n_i keys that query i sees (Eq. 2, and
    with b Eq. 4), or a learned p_{n_i} in its place (Eq. 3). Both are computed in float32 and rounded once.

    qkv [T, N + 2K, H]: the output of the projection, the heads of q first, then those of k, then those of v.
        N = num_heads, a multiple of K; H ≤ 128. bfloat16, float16, float32 (float64 too on the CPU). A token's values
        must be contiguous (else they are copied), with any stride between tokens.
    cos, sin [T, H / 2] float32 (float64 with float64): of the angles of each token; None: no rotation. H must be even.
    log_n [T] float32 (float64 with float64); s and b [N] of any floating dtype. s is needed with log_n; b may be None.
    cu_seqlens, max_seqlen, uniform_length, scale, window, deterministic, backend: as `softmax_attention` takes them.

    Returns o [T, N, H] in the dtype of qkv. qkv, log_n, s and b are differentiable. The gradients of the factor are
    the same bits in every run for the same dq; that of the attention kernel is so where `deterministic` is set.

    Raises ValueError for shapes, dtypes and devices that do not fit, for cos without sin, for log_n without s or the
    reverse, for b without log_n, and for a backend that cannot run.
    """
    _check(qkv, num_heads, cos, sin, log_n, s, b)
    head_dim = qkv.shape[2]
    num_kv_heads = (qkv.shape[1] - num_heads) // 2
    q, k, v = qkv.split((num_heads, num_kv_heads, num_kv_heads), 1)
    check(q, k, v, cu_seqlens, max_seqlen, uniform_length, window)
    if deterministic is None:
        deterministic = torch.are_deterministic_algorithms_enabled()
    scale = head_dim**-0.5 if scale is None else scale
    qkv = qkv if qkv.stride()[1:] == (head_dim, 1) else qkv.contiguous()
    documents = (cu_seqlens, num_heads, max_seqlen, uniform_length, scale, window, deterministic, backend)
    o, *_ = ops.forward_op(qkv, cos, sin, log_n, s, b, *documents)
    return o


def _check(
    qkv: Tensor,
    num_heads: int,
    cos: Tensor | None,
    sin: Tensor | None,
    log_n: Tensor | None,
    s: Tensor | None,
    b: Tensor | None,
) -> None:
    if qkv.dim() != 3 or num_heads < 1 or qkv.shape[1] <= num_heads or (qkv.shape[1] - num_heads) % 2:
        raise ValueError(
            f"qkv must be [T, N + 2K, H] with N = num_heads, got {tuple(qkv.shape)} for num_heads={num_heads}"
        )
    num_tokens, _, head_dim = qkv.shape
    if (cos is None) != (sin is None):
        raise ValueError("cos and sin must be given together")
    for name, table in (("cos", cos), ("sin", sin)):
        if table is not None and (head_dim % 2 or table.shape != (num_tokens, head_dim // 2)):
            raise ValueError(
                f"{name} must be [T, H / 2] with an even H, got {tuple(table.shape)} for {tuple(qkv.shape)}"
            )
    if (log_n is None) != (s is None) or (log_n is None and b is not None):
        raise ValueError("log_n and s must be given together, and b only with them")
    for name, value, size in (("log_n", log_n, num_tokens), ("s", s, num_heads), ("b", b, num_heads)):
        if value is not None and value.shape != (size,):
            raise ValueError(f"{name} must be [{size}], got {tuple(value.shape)}")
