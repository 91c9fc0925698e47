"""The public function: it checks its arguments, fills in the defaults and calls the operator."""

import torch
from torch import Tensor

from . import ops

MAX_HEAD_DIM = 128
DTYPES = {
    "cpu": (torch.bfloat16, torch.float16, torch.float32, torch.float64),
    "cuda": (torch.bfloat16, torch.float16, torch.float32),
}


def softmax_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    cu_seqlens: Tensor,
    max_seqlen: int,
    uniform_length: int | None = None,
    scale: float | None = None,
    window: int | None = None,
    deterministic: bool | None = None,
    backend: str = "auto",
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """o_i = Σ_{j ≤ i} softmax_j(scale · q_i·k_j) v_j within each document (arXiv:1706.03762, Eq. 1, causal).

    q [T, N, H]; k, v [T, K, H] with N a multiple of K and H ≤ 128; bfloat16, float16, float32 (float64 too on the CPU).
    cu_seqlens [num_documents + 1] int32: boundaries of the documents, from 0 to T; equal neighbours are empty
        documents.
    max_seqlen: an upper bound of the documents' lengths, in tokens. uniform_length: the length of all documents,
        where they share one.
    scale: of the logits; None: 1/√H. window: query i sees the keys i − window < j ≤ i; None: all j ≤ i.
    deterministic: gradients are the same bits in every run, at FlashAttention-2's speed; None: as torch's global flag
        says.
    backend: `cudnn` or `flash` (FlashAttention-2) on a GPU replace the choice of the faster one (`auto`).
    return_lse: also return lse_i = ln Σ_j exp(scale · q_i·k_j), [T, N] float32 (float64 for float64), which has no
        gradient. Other ranks' results merge by it (`merge_`).

    Returns o [T, N, H] in the dtype of q. Accumulates in float32 (float64 for float64). From Hopper on cuDNN runs, on
    other GPUs FlashAttention-2; float32 and head dims that are not multiples of 8 run in plain torch on GPUs.

    Raises ValueError for shapes, dtypes and devices that do not fit, for a backend that cannot run and, on the CPU, for
    boundaries that do not ascend from 0 to T.
    """
    check(q, k, v, cu_seqlens, max_seqlen, uniform_length, window)
    scale = q.shape[2] ** -0.5 if scale is None else scale
    if deterministic is None:
        deterministic = torch.are_deterministic_algorithms_enabled()
    o, lse = ops.forward_op(q, k, v, cu_seqlens, max_seqlen, uniform_length, scale, window, deterministic, backend)
    return (o, lse) if return_lse else o


def check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    uniform_length: int | None,
    window: int | None,
) -> None:
    """Raises ValueError, with the value that does not fit."""
    shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
    if q.dim() != 3 or k.dim() != 3 or k.shape != v.shape or q.shape[::2] != k.shape[::2]:
        raise ValueError(f"attention takes q [T, N, H] and k, v [T, K, H], got {shapes}")
    if k.shape[1] == 0 or q.shape[1] == 0 or q.shape[1] % k.shape[1]:
        raise ValueError(f"the number of query heads must be a multiple of the number of key heads, got {shapes}")
    if not 1 <= q.shape[2] <= MAX_HEAD_DIM:
        raise ValueError(f"head dims from 1 to {MAX_HEAD_DIM} are supported, got {q.shape[2]}")
    if q.device.type not in DTYPES:
        raise ValueError(f"attention runs on {' and '.join(DTYPES)}, got {q.device}")
    if q.dtype not in DTYPES[q.device.type] or k.dtype != q.dtype or v.dtype != q.dtype:
        allowed = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES[q.device.type])
        raise ValueError(f"q, k and v must share one dtype of {allowed}, got {q.dtype}, {k.dtype}, {v.dtype}")
    if cu_seqlens.dtype != torch.int32 or cu_seqlens.dim() != 1 or cu_seqlens.shape[0] < 2:
        raise ValueError(
            f"cu_seqlens must be int32 [num_documents + 1], got {cu_seqlens.dtype} {tuple(cu_seqlens.shape)}"
        )
    if max_seqlen < 1:
        raise ValueError(f"max_seqlen must be at least 1, got {max_seqlen}")
    if uniform_length is not None and (uniform_length < 1 or q.shape[0] % uniform_length):
        raise ValueError(f"uniform_length={uniform_length} must divide the {q.shape[0]} tokens")
    if window is not None and window < 1:
        raise ValueError(f"window must be at least 1 (the query's own key), got {window}")
