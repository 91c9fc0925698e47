"""The public function: checks, defaults, dispatch."""

import torch
from torch import Tensor

from . import ops

MAX_HEAD_DIM = 128
# Up to this many queries × heads a key head, without gradients, the keys are split instead of the queries.
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
    """o_j = e^log_rest_in Σ_{i<j} A_ij v_i,  A_ij = β_ij Π_{i<k<j} (1 − β_kj),  β = σ(scale · q·k)   (arXiv:2410.17980, Eq. 4)

    A query attends to strictly earlier keys, the nearest first; what it leaves of its stick, Π (1 − β), comes back as
    `log_rest`. A query that sees no key has o = 0 and log_rest = log_rest_in (or 0).

    q [T, N, H]; k, v [S, K, H] with N a multiple of K and H ≤ 128; bfloat16, float16, float32 (float64 too on the CPU).
    cu_seqlens_q, cu_seqlens_k [num_sequences + 1]: boundaries of the packed sequences, int32; equal neighbours are empty
        sequences. None: one sequence; for the keys, those of the queries.
    max_seqlen_q,
    max_seqlen_k: upper bounds of the sequence lengths; T and S unless given. They size backward's scratch and choose
        the decoding kernels; on a GPU a sequence of more keys than max_seqlen_k comes out as NaN.
    q_offsets [num_sequences] int32: position of a sequence's first query relative to its first key; query r of a sequence
        sees its keys 0 .. q_offset + r − 1. None: 0, plain causal.
    scale: 1/√H unless given.
    log_rest_in [T, N] float32: ln of the stick that nearer keys left over; it scales o and is included in log_rest.
    skip_below: keys behind the point where a whole tile of queries has less than this of its stick left are skipped, in both
        directions: |Δo| ≤ skip_below · max|v|, and log_rest there is an upper bound. 0 skips nothing. The CPU never skips.
    deterministic: gradients are the same bits from run to run either way; accepted so that callers can insist.

    Returns o [T, N, H] in q.dtype and log_rest [T, N] float32 (float64 for float64), natural log, both differentiable in
    q, k, v and log_rest_in. Accumulates in float32. Raises ValueError for shapes that do not fit, boundaries that do not
    ascend from 0 to T (checked on the CPU; on a GPU, where looking would stall it, out-of-range boundaries are clamped),
    unsupported dtypes and devices, and head dims above 128.
    """
    _check(q, k, v, cu_seqlens_q, cu_seqlens_k, q_offsets, log_rest_in, skip_below)
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
    scale = q.shape[2] ** -0.5 if scale is None else scale
    wants_grad = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (q, k, v, log_rest_in))
    few = max_seqlen_q * (q.shape[1] // k.shape[1]) <= MAX_DECODE_ROWS
    op = ops.decode_op if few and not wants_grad else ops.forward_op
    o, log_rest, *_ = op(
        q, k, v, cu_seqlens_q, cu_seqlens_k, q_offsets, log_rest_in, max_seqlen_q, max_seqlen_k, scale, float(skip_below)
    )  # fmt: skip
    return o, log_rest


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
