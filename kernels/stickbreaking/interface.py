"""The public function: argument checks, defaults and dispatch."""

import torch
from torch import Tensor

from . import ops

MAX_HEAD_DIM = 128
# Up to this many queries × heads per key head, and without gradients, keys are split instead of queries.
MAX_DECODE_ROWS = 64
DTYPES = {
    "cpu": (torch.bfloat16, torch.float16, torch.float32, torch.float64),
    "cuda": (torch.bfloat16, torch.float16, torch.float32),
}


def stickbreaking_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    q_offsets: Tensor | None = None,
    scale: float | None = None,
    log_rest_in: Tensor | None = None,
    skip_below: float = 2**-12,
    deterministic: bool = False,
) -> tuple[Tensor, Tensor]:
    """o_j = e^log_rest_in Σ_{i<j} A_ij v_i,  A_ij = β_ij Π_{i<m<j} (1 − β_mj),  β_ij = σ(scale · q_j·k_i)

    This is Eq. 1 of arXiv:2410.17980. A query attends to strictly earlier keys, the nearest first. The unspent stick,
    Π (1 − β), is returned as `log_rest`. A query without keys has o = 0 and log_rest = log_rest_in (or 0).

    q [T, N, H]; k, v [S, K, H] with N a multiple of K, H ≤ 128; bfloat16, float16, float32 (on the CPU also float64).
    cu_seqlens_q, cu_seqlens_k [num_sequences + 1] int32: boundaries of the packed sequences; equal neighbours mark empty
        sequences. None: one sequence; for the keys, the boundaries of the queries.
    max_seqlen_q, max_seqlen_k: upper bounds of sequence lengths, by default T and S. They size backward's scratch and
        select decoding kernels. On a GPU, a sequence with more keys than max_seqlen_k gives NaN.
    q_offsets [num_sequences] int32: position of a sequence's first query relative to its first key. Query r of a
        sequence attends to its keys 0 .. q_offset + r − 1. None: 0, plain causal attention.
    scale: by default 1/√H.
    log_rest_in [T, N] float32: ln of the stick that nearer keys have left. It scales o and is included in log_rest.
    skip_below: keys are skipped, in forward and backward, once all queries of a tile have less than this share of their
        stick left. Then |Δo| ≤ skip_below · max|v|, and log_rest is an upper bound. 0 skips nothing, as on the CPU.
    deterministic: accepted for callers that require it. Gradients are bitwise reproducible in any case.

    Returns o [T, N, H] in q.dtype and log_rest [T, N] float32 (float64 for float64), natural log, both differentiable
    in q, k, v and log_rest_in. Accumulates in float32. Raises ValueError for shapes that do not fit, unsupported dtypes
    and devices, head dims above 128, and, on the CPU only, boundaries that do not ascend from 0 to T. On a GPU this
    check would stall it, and boundaries are clamped instead.
    """
    _check(q, k, v, cu_seqlens_q, cu_seqlens_k, q_offsets, log_rest_in, skip_below)
    layout = _layout(q, k, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
    cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k = layout
    scale = q.shape[2] ** -0.5 if scale is None else scale
    wants_grad = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (q, k, v, log_rest_in))
    few = max_seqlen_q * (q.shape[1] // k.shape[1]) <= MAX_DECODE_ROWS
    arguments = (
        q, k, v, cu_seqlens_q, cu_seqlens_k, q_offsets, log_rest_in, max_seqlen_q, max_seqlen_k, scale, float(skip_below)
    )  # fmt: skip
    if few and not wants_grad:
        o, log_rest = ops.decode_op(*arguments)
    else:
        o, log_rest, *_ = ops.forward_op(*arguments)
    return o, log_rest


def _layout(
    q: Tensor,
    k: Tensor,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    max_seqlen_q: int | None,
    max_seqlen_k: int | None,
) -> tuple[Tensor, Tensor, int, int]:
    """Returns the boundaries of queries and keys and the longest of each, with defaults for None."""
    if cu_seqlens_q is None:
        cu_seqlens_q = torch.tensor([0, q.shape[0]], dtype=torch.int32, device=q.device)
        max_seqlen_q = q.shape[0]
        if cu_seqlens_k is None and k.shape[0] != q.shape[0]:
            cu_seqlens_k = torch.tensor([0, k.shape[0]], dtype=torch.int32, device=q.device)
            max_seqlen_k = k.shape[0]
    if cu_seqlens_k is None:
        cu_seqlens_k, max_seqlen_k = cu_seqlens_q, max_seqlen_q
    max_seqlen_q = q.shape[0] if max_seqlen_q is None else max_seqlen_q
    max_seqlen_k = k.shape[0] if max_seqlen_k is None else max_seqlen_k
    return cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k


def _check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    q_offsets: Tensor | None,
    log_rest_in: Tensor | None,
    skip_below: float,
) -> None:
    shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
    if q.dim() != 3 or k.dim() != 3 or k.shape != v.shape or q.shape[2] != k.shape[2]:
        raise ValueError(f"stick-breaking attention takes q [T, N, H] and k, v [S, K, H], got {shapes}")
    if k.shape[1] == 0 or q.shape[1] == 0 or q.shape[1] % k.shape[1]:
        raise ValueError(f"the number of query heads must be a multiple of the number of key heads, got {shapes}")
    if not 1 <= q.shape[2] <= MAX_HEAD_DIM:
        raise ValueError(f"head dims from 1 to {MAX_HEAD_DIM} are supported, got {q.shape[2]}")
    device = q.device.type
    if device not in DTYPES:
        raise ValueError(f"stick-breaking attention runs on {' and '.join(DTYPES)}, got {q.device}")
    if q.dtype not in DTYPES[device] or k.dtype != q.dtype or v.dtype != q.dtype:
        raise ValueError(f"q, k, v must share one of {DTYPES[device]} on {device}, got {q.dtype}, {k.dtype}, {v.dtype}")
    if not 0 <= skip_below < 1:
        raise ValueError(f"skip_below is a share of the stick, 0 <= skip_below < 1, got {skip_below}")
    others = {
        "k": k,
        "v": v,
        "cu_seqlens_q": cu_seqlens_q,
        "cu_seqlens_k": cu_seqlens_k,
        "q_offsets": q_offsets,
        "log_rest_in": log_rest_in,
    }
    for name, x in others.items():
        if x is not None and x.device != q.device:
            raise ValueError(f"{name} is on {x.device} and q on {q.device}")
    _check_layout(q, k, cu_seqlens_q, cu_seqlens_k, q_offsets)
    if log_rest_in is not None and (log_rest_in.shape != q.shape[:2] or not log_rest_in.is_floating_point()):
        raise ValueError(
            f"log_rest_in must be {tuple(q.shape[:2])} in floating point, got {tuple(log_rest_in.shape)} {log_rest_in.dtype}"
        )


def _check_layout(
    q: Tensor, k: Tensor, cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None, q_offsets: Tensor | None
) -> None:
    integers = (torch.int32, torch.int64)
    for name, x in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        if x is not None and (x.dim() != 1 or x.shape[0] < 2 or x.dtype not in integers):
            raise ValueError(f"{name} must be [num_sequences + 1] in int32 or int64, got {tuple(x.shape)} {x.dtype}")
    num_sequences = 1 if cu_seqlens_q is None else cu_seqlens_q.shape[0] - 1
    if cu_seqlens_k is None and num_sequences != 1 and k.shape[0] != q.shape[0]:
        raise ValueError(f"{q.shape[0]} queries in {num_sequences} sequences over {k.shape[0]} keys need cu_seqlens_k")
    if cu_seqlens_k is not None and cu_seqlens_k.shape[0] != num_sequences + 1:
        raise ValueError(
            f"cu_seqlens_k describes {cu_seqlens_k.shape[0] - 1} sequences and cu_seqlens_q {num_sequences}"
        )
    if q_offsets is not None and (q_offsets.shape != (num_sequences,) or q_offsets.dtype not in integers):
        raise ValueError(
            f"q_offsets must be [{num_sequences}] in int32 or int64, got {tuple(q_offsets.shape)} {q_offsets.dtype}"
        )
