"""Stick-breaking attention over a paged key/value cache, as serving engines keep it: the function and its operator."""

import torch
from torch import Tensor

from ..versions import mark
from . import paged_torch
from .interface import DTYPES, MAX_HEAD_DIM
from .ops import announce, starts

mark(__file__)


def paged_stickbreaking(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    cu_seqlens_q: Tensor,
    seq_lens: Tensor,
    scale: float | None = None,
    skip_below: float = 2**-12,
    *,
    remainder: bool = False,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """o_i = Σ_{j<i} A_ij v_j,  A_ij = β_ij Π_{j<m<i} (1 − β_im),  β_ij = σ(scale · q_i·k_j)

    This is Eq. 1 of arXiv:2410.17980 for the new tokens of B sequences, each the last ones of its sequence; their keys
    and values are in the cache already. Prefill chunks and decodes may be mixed. For inference only.

    q [T, N, H]: the new tokens, sequence by sequence; bfloat16, float16, float32 (on the CPU also float64), H ≤ 128.
    k_cache, v_cache [num_blocks, block_size, K, H] in the dtype of q, N a multiple of K. Both have the same strides,
        whatever they are, and a contiguous last dim. Slots that hold no key may contain anything.
    block_table [B, max_blocks] int32: key j of sequence b is in slot j % block_size of block
        block_table[b, j // block_size]. Entries after a sequence's last block may contain anything. Blocks may be
        shared and in any order.
    cu_seqlens_q [B + 1] int32: boundaries of the sequences in q; equal neighbours mark a sequence without new tokens.
        Tokens of q after the last boundary are padding: their results are undefined.
    seq_lens [B] int32: keys of each sequence, the new ones included.
    scale: by default 1/√H.
    skip_below: keys are skipped once all queries of a tile have less than this share of their stick left. Then
        |Δo| ≤ 2 · skip_below · max|v|, and log_rest is an upper bound. 0 skips nothing, as on the CPU.
    remainder: adds exp(log_rest) · v_i, so that the unspent stick goes to the query's own value (Eq. 13).
    max_seqlen_q, max_seqlen_k: upper bounds of new tokens and keys per sequence, by default T and
        max_blocks · block_size. They choose kernels and grids, and nothing is read from the GPU: with equal shapes and
        bounds, a CUDA graph serves any lengths. A sequence with more than max_seqlen_q new tokens is undefined.
    out: contiguous, of the shape and dtype of q: o is written there.

    Returns o [T, N, H] in q.dtype and log_rest [T, N] float32 (float64 for float64), natural log. Accumulates in
    float32. Equal inputs give equal bits. Raises ValueError for shapes that do not fit, unsupported dtypes and
    devices, head dims above 128, and, on the CPU only, for boundaries and lengths that do not fit.
    """
    _check(q, k_cache, v_cache, skip_below)
    _check_layout(q, block_table, cu_seqlens_q, seq_lens)
    o = _output(q, out)
    scale = q.shape[2] ** -0.5 if scale is None else scale
    max_seqlen_q = q.shape[0] if max_seqlen_q is None else max_seqlen_q
    max_seqlen_k = block_table.shape[1] * k_cache.shape[1] if max_seqlen_k is None else max_seqlen_k
    layout = (block_table, cu_seqlens_q, seq_lens, max_seqlen_q, max_seqlen_k)
    return o, paged_op(o, q, k_cache, v_cache, *layout, scale, float(skip_below), remainder)


@torch.library.custom_op("stickbreaking::paged", mutates_args=("o",), device_types="cpu")
def paged_op(
    o: Tensor,
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    cu_seqlens_q: Tensor,
    seq_lens: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    scale: float,
    skip_below: float,
    remainder: bool,
) -> Tensor:
    """Writes o and returns log_rest, without gradients."""
    announce("the CPU over a paged cache: plain torch, exact (nothing is skipped)")
    boundaries, lengths = _host_layout(block_table, cu_seqlens_q, seq_lens, q.shape[0], k_cache.shape[1])
    found, log_rest = paged_torch.forward(q, k_cache, v_cache, block_table, boundaries, lengths, scale, remainder)
    o.copy_(found)
    return log_rest


@paged_op.register_kernel("cuda")
def _(  # type: ignore[no-untyped-def]
    o, q, k_cache, v_cache, block_table, cu_seqlens_q, seq_lens, max_seqlen_q, max_seqlen_k, scale, skip_below, remainder
):  # fmt: skip
    from . import paged_launch  # imported here because a machine without a GPU may lack Triton

    announce(f"{q.device}: Triton kernels over a paged cache, {q.dtype}, skipping below {skip_below:g}")
    _, log_rest = paged_launch.paged(
        q,
        k_cache,
        v_cache,
        block_table,
        cu_seqlens_q,
        seq_lens,
        max_seqlen_q,
        max_seqlen_k,
        scale,
        skip_below,
        remainder,
        out=o,
    )
    return log_rest


@paged_op.register_fake
def _(o, q, *_):  # type: ignore[no-untyped-def]
    return q.new_empty(q.shape[:2], dtype=torch.promote_types(q.dtype, torch.float32))


def _output(q: Tensor, out: Tensor | None) -> Tensor:
    if out is None:
        return torch.empty_like(q, memory_format=torch.contiguous_format)
    if out.shape != q.shape or out.dtype != q.dtype or out.device != q.device or not out.is_contiguous():
        raise ValueError(
            f"out must be contiguous {tuple(q.shape)}, {q.dtype}, {q.device}, got {tuple(out.shape)} with strides "
            f"{out.stride()}, {out.dtype}, {out.device}"
        )
    return out


def _host_layout(
    block_table: Tensor, cu_seqlens_q: Tensor, seq_lens: Tensor, num_tokens: int, block_size: int
) -> tuple[list[int], list[int]]:
    lengths: list[int] = seq_lens.tolist()
    total = int(cu_seqlens_q[-1])
    boundaries = starts("cu_seqlens_q", cu_seqlens_q, total)
    if total > num_tokens:
        raise ValueError(f"cu_seqlens_q ends at {total}, and q has {num_tokens} tokens")
    capacity = block_table.shape[1] * block_size
    for i, length in enumerate(lengths):
        num_queries = boundaries[i + 1] - boundaries[i]
        if not num_queries <= length <= capacity:
            raise ValueError(
                f"seq_lens[{i}] must be from {num_queries}, its new tokens, to {capacity}, its slots, got {length}"
            )
    return boundaries, lengths


def _check(q: Tensor, k_cache: Tensor, v_cache: Tensor, skip_below: float) -> None:
    shapes = f"q {tuple(q.shape)}, k_cache {tuple(k_cache.shape)}, v_cache {tuple(v_cache.shape)}"
    if q.dim() != 3 or k_cache.dim() != 4 or k_cache.shape != v_cache.shape or q.shape[2] != k_cache.shape[3]:
        raise ValueError(f"a paged cache takes q [T, N, H] and caches [blocks, block_size, K, H], got {shapes}")
    if k_cache.stride() != v_cache.stride() or k_cache.stride(3) != 1:
        strides = f"{k_cache.stride()}, {v_cache.stride()}"
        raise ValueError(f"the caches must have the same strides and a contiguous last dim, got {strides}")
    if 0 in k_cache.shape[1:3] or q.shape[1] == 0 or q.shape[1] % k_cache.shape[2]:
        raise ValueError(f"the number of query heads must be a multiple of the number of key heads, got {shapes}")
    if not 1 <= q.shape[2] <= MAX_HEAD_DIM:
        raise ValueError(f"head dims from 1 to {MAX_HEAD_DIM} are supported, got {q.shape[2]}")
    device = q.device.type
    if device not in DTYPES:
        raise ValueError(f"stick-breaking attention runs on {' and '.join(DTYPES)}, got {q.device}")
    if q.dtype not in DTYPES[device] or k_cache.dtype != q.dtype or v_cache.dtype != q.dtype:
        dtypes = f"{q.dtype}, {k_cache.dtype}, {v_cache.dtype}"
        raise ValueError(f"q and the caches must share one of {DTYPES[device]} on {device}, got {dtypes}")
    if not 0 <= skip_below < 1:
        raise ValueError(f"skip_below is a share of the stick, 0 <= skip_below < 1, got {skip_below}")
    if k_cache.device != q.device or v_cache.device != q.device:
        raise ValueError(f"the caches are on {k_cache.device} and {v_cache.device}, and q on {q.device}")


def _check_layout(q: Tensor, block_table: Tensor, cu_seqlens_q: Tensor, seq_lens: Tensor) -> None:
    shapes = f"block_table {tuple(block_table.shape)}, cu_seqlens_q {tuple(cu_seqlens_q.shape)}, "
    shapes += f"seq_lens {tuple(seq_lens.shape)}"
    if (
        block_table.dim() != 2
        or seq_lens.shape != block_table.shape[:1]
        or cu_seqlens_q.shape != (seq_lens.shape[0] + 1,)
    ):
        raise ValueError(
            f"a paged cache takes block_table [B, max_blocks], [B + 1] boundaries, [B] lengths, got {shapes}"
        )
    for name, x in (("block_table", block_table), ("cu_seqlens_q", cu_seqlens_q), ("seq_lens", seq_lens)):
        if x.dtype not in (torch.int32, torch.int64):
            raise ValueError(f"{name} must be int32 or int64, got {x.dtype}")
        if x.device != q.device:
            raise ValueError(f"{name} is on {x.device} and q on {q.device}")
