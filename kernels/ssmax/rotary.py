"""Triton kernels that rotate q and k and multiply q by Scalable-Softmax's factor, and their backward pass.

With R_i the rotation by the angles of token i (arXiv:2104.09864) and f_i = s · log_n_i + b the factor of a head
(arXiv:2501.19399, Eq. 2 and 4):

    forward    q'_i = f_i · R_i q_i     k'_i = R_i k_i
    backward   u_i = R_i⁻¹ dq'_i        dq_i = f_i · u_i         dk_i = R_i⁻¹ dk'_i
               df_i = u_i · q_i         ds = Σ_i log_n_i df_i    db = Σ_i df_i         dlog_n_i = Σ_heads s df_i

Forward and backward are bound by memory. Forward reads q and k where they lie in the fused projection and writes the
results once. Backward reads dq' and dk' (and q, where gradients of the factor are wanted) and writes dq and dk into the
gradient of the projection.

One program handles BT tokens of BH heads, all of them query heads or all of them key heads. The rotation pairs value
d of a head with value d + H/2, so a program holds the two halves of its heads as two tensors [BT, BH, BD], where BD
is H/2 rounded up to a power of two.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

# Number of partial sums, one per block of tokens, that `reduce_kernel` reads in one iteration.
REDUCED = tl.constexpr(1024)


class Tiling(NamedTuple):
    """The launch settings of a rotation kernel."""

    pairs: int  # (token, head) pairs per program
    num_warps: int


def tiling(head_dim: int) -> Tiling:
    """About 8 KiB of bf16 per program: enough bytes in flight on a multiprocessor, and 32 values per thread."""
    return Tiling(max(8, 4096 // triton.next_power_of_2(head_dim)), 4)


def _heads_per_program(num_heads: int, num_kv_heads: int) -> int:
    """The largest power of two up to 8 that divides both counts, so that no program has both query and key heads."""
    return next(n for n in (8, 4, 2, 1) if num_heads % n == 0 and num_kv_heads % n == 0)


@triton.jit
def _half(
    ptr,
    tokens,
    heads,
    dims,
    token_stride,
    valid,
    H: tl.constexpr,
    FIRST: tl.constexpr,
    COUNT: tl.constexpr,
):
    """Returns pointers to the values FIRST to FIRST + COUNT of each head [BT, BH, BD], and which exist [BT, 1, BD]."""
    offsets = tokens[:, None, None] * token_stride + heads[None, :, None] * H + dims[None, None, :] + FIRST
    return ptr + offsets, valid[:, None, None] & (dims < COUNT)[None, None, :]


@triton.jit
def _load(
    ptr,
    tokens,
    heads,
    dims,
    token_stride,
    valid,
    H: tl.constexpr,
):
    """Both halves of each head in float32, [BT, BH, BD] each. Where H is odd, a 0 fills up the second one."""
    HALF: tl.constexpr = (H + 1) // 2
    first, has_first = _half(ptr, tokens, heads, dims, token_stride, valid, H, 0, HALF)
    second, has_second = _half(ptr, tokens, heads, dims, token_stride, valid, H, HALF, H - HALF)
    return tl.load(first, has_first, 0.0).to(tl.float32), tl.load(second, has_second, 0.0).to(tl.float32)


@triton.jit
def _store(
    ptr,
    x,
    y,
    tokens,
    heads,
    dims,
    token_stride,
    valid,
    H: tl.constexpr,
):
    """Rounds both halves x and y, [BT, BH, BD] each, to the dtype of `ptr`."""
    HALF: tl.constexpr = (H + 1) // 2
    first, has_first = _half(ptr, tokens, heads, dims, token_stride, valid, H, 0, HALF)
    second, has_second = _half(ptr, tokens, heads, dims, token_stride, valid, H, HALF, H - HALF)
    tl.store(first, x.to(ptr.dtype.element_ty), has_first)
    tl.store(second, y.to(ptr.dtype.element_ty), has_second)


@triton.jit
def _angles(cos_ptr, sin_ptr, tokens, dims, valid, H: tl.constexpr):
    """cos and sin of each token, [BT, 1, BD]."""
    HALF: tl.constexpr = (H + 1) // 2
    at = tokens[:, None] * HALF + dims[None, :]
    exists = valid[:, None] & (dims < HALF)[None, :]
    return tl.load(cos_ptr + at, exists, 1.0)[:, None, :], tl.load(sin_ptr + at, exists, 0.0)[:, None, :]


@triton.jit
def _factor(log_n_ptr, s_ptr, b_ptr, tokens, heads, valid, HAS_B: tl.constexpr):
    """log_n [BT], s [BH] and the factor s · log_n + b [BT, BH], in float32."""
    log_n = tl.load(log_n_ptr + tokens, valid, 0.0).to(tl.float32)
    s = tl.load(s_ptr + heads).to(tl.float32)
    factor = log_n[:, None] * s[None, :]
    if HAS_B:
        factor += tl.load(b_ptr + heads).to(tl.float32)[None, :]
    return log_n, s, factor


@triton.jit(do_not_specialize=["num_tokens"])
def forward_kernel(
    qkv_ptr,
    q_ptr,
    k_ptr,
    cos_ptr,
    sin_ptr,
    log_n_ptr,
    s_ptr,
    b_ptr,
    num_tokens,
    stride_qkv_t,
    N: tl.constexpr,
    K: tl.constexpr,
    H: tl.constexpr,
    BT: tl.constexpr,
    BH: tl.constexpr,
    BD: tl.constexpr,
    ROTATE: tl.constexpr,
    HAS_FACTOR: tl.constexpr,
    HAS_B: tl.constexpr,
):
    """qkv [T, N + 2K, H] → q [T, N, H], k [T, K, H]. Grid: groups of BH heads × blocks of BT tokens."""
    # In the projection the key heads follow the query heads, so that N + h is key head h.
    # [BH]
    heads = tl.program_id(0) * BH + tl.arange(0, BH)
    # [BT] in 64 bits: the offsets of the values of a long batch do not fit into 32.
    tokens = tl.program_id(1).to(tl.int64) * BT + tl.arange(0, BT)
    valid, dims = tokens < num_tokens, tl.arange(0, BD)
    # [BT, BH, BD]
    x, y = _load(qkv_ptr, tokens, heads, dims, stride_qkv_t, valid, H)
    if ROTATE:
        cos, sin = _angles(cos_ptr, sin_ptr, tokens, dims, valid, H)
        x, y = x * cos - y * sin, y * cos + x * sin
    is_query = tl.program_id(0) * BH < N
    if is_query:
        if HAS_FACTOR:
            _, _, factor = _factor(log_n_ptr, s_ptr, b_ptr, tokens, heads, valid, HAS_B)
            x, y = x * factor[:, :, None], y * factor[:, :, None]
        _store(q_ptr, x, y, tokens, heads, dims, N * H, valid, H)
    else:
        _store(k_ptr, x, y, tokens, heads - N, dims, K * H, valid, H)


@triton.jit
def _store_factor_grads(
    d_factor,
    log_n,
    s,
    sums_ptr,
    dlog_n_ptr,
    tokens,
    heads,
    valid,
    num_tokens,
    N: tl.constexpr,
    LOG_N_GRAD: tl.constexpr,
):
    """A program's share of ds, db and dlog_n. d_factor [BT, BH].

    sums [2, N, blocks] holds log_n · df and df, summed over the block's tokens; dlog_n [groups of heads, T] holds s ·
    df, summed over the group's heads. A program writes entries of its own, because atomic sums would differ from run
    to run.
    """
    at = sums_ptr + heads * tl.num_programs(1) + tl.program_id(1)
    tl.store(at, tl.sum(d_factor * log_n[:, None], 0))
    tl.store(at + N * tl.num_programs(1), tl.sum(d_factor, 0))
    if LOG_N_GRAD:
        at_log_n = dlog_n_ptr + tl.program_id(0).to(tl.int64) * num_tokens + tokens
        tl.store(at_log_n, tl.sum(d_factor * s[None, :], 1), valid)


@triton.jit(do_not_specialize=["num_tokens"])
def backward_kernel(
    dq_ptr,
    dk_ptr,
    qkv_ptr,
    dqkv_ptr,
    cos_ptr,
    sin_ptr,
    log_n_ptr,
    s_ptr,
    b_ptr,
    sums_ptr,
    dlog_n_ptr,
    num_tokens,
    stride_qkv_t,
    stride_dqkv_t,
    N: tl.constexpr,
    K: tl.constexpr,
    H: tl.constexpr,
    BT: tl.constexpr,
    BH: tl.constexpr,
    BD: tl.constexpr,
    ROTATE: tl.constexpr,
    HAS_FACTOR: tl.constexpr,
    HAS_B: tl.constexpr,
    FACTOR_GRAD: tl.constexpr,
    LOG_N_GRAD: tl.constexpr,
):
    """dq' [T, N, H], dk' [T, K, H] (`dq_ptr`, `dk_ptr`) → dq and dk as parts of dqkv [T, N + 2K, H], sums, dlog_n.

    The v part of dqkv is not written here. Grid: as `forward_kernel`.
    """
    heads = tl.program_id(0) * BH + tl.arange(0, BH)
    tokens = tl.program_id(1).to(tl.int64) * BT + tl.arange(0, BT)
    valid, dims = tokens < num_tokens, tl.arange(0, BD)
    is_query = tl.program_id(0) * BH < N
    # [BT, BH, BD]
    if is_query:
        x, y = _load(dq_ptr, tokens, heads, dims, N * H, valid, H)
    else:
        x, y = _load(dk_ptr, tokens, heads - N, dims, K * H, valid, H)
    if ROTATE:  # the inverse rotation
        cos, sin = _angles(cos_ptr, sin_ptr, tokens, dims, valid, H)
        x, y = x * cos + y * sin, y * cos - x * sin
    if HAS_FACTOR and is_query:
        log_n, s, factor = _factor(log_n_ptr, s_ptr, b_ptr, tokens, heads, valid, HAS_B)
        if FACTOR_GRAD:
            # df = dq' · (R q) = (R⁻¹ dq') · q, so q need not be rotated again. R q could also be had from forward's
            # result as q' / f, but f may be 0.
            q_x, q_y = _load(qkv_ptr, tokens, heads, dims, stride_qkv_t, valid, H)
            # [BT, BH]
            d_factor = tl.sum(x * q_x + y * q_y, 2)
            _store_factor_grads(
                d_factor, log_n, s, sums_ptr, dlog_n_ptr, tokens, heads, valid, num_tokens, N, LOG_N_GRAD
            )
        x, y = x * factor[:, :, None], y * factor[:, :, None]
    _store(dqkv_ptr, x, y, tokens, heads, dims, stride_dqkv_t, valid, H)


@triton.jit(do_not_specialize=["num_blocks"])
def reduce_kernel(sums_ptr, ds_ptr, db_ptr, num_blocks, N: tl.constexpr):
    """sums [2, N, num_blocks] → ds [N] and db [N], added in a fixed order. Grid: 2N programs, one per result."""
    index, total = tl.program_id(0), tl.zeros((REDUCED,), tl.float32)
    for first in range(0, num_blocks, REDUCED):
        block = first + tl.arange(0, REDUCED)
        total += tl.load(sums_ptr + index * num_blocks + block, block < num_blocks, 0.0)
    if index < N:
        tl.store(ds_ptr + index, tl.sum(total, 0).to(ds_ptr.dtype.element_ty))
    else:
        tl.store(db_ptr + index - N, tl.sum(total, 0).to(db_ptr.dtype.element_ty))


def _launch(
    qkv: Tensor,
    num_heads: int,
    cos: Tensor | None,
    log_n: Tensor | None,
    b: Tensor | None,
    tuned: Tiling | None,
) -> tuple[tuple[int, int], dict[str, Any]]:
    """The grid (groups of heads, blocks of tokens) and the constants of both kernels."""
    num_tokens, heads, head_dim = qkv.shape
    num_kv_heads = (heads - num_heads) // 2
    pairs, num_warps = tuned or tiling(head_dim)
    head_block = _heads_per_program(num_heads, num_kv_heads)
    token_block = max(1, pairs // head_block)
    grid = ((num_heads + num_kv_heads) // head_block, triton.cdiv(num_tokens, token_block))
    constants = {
        "N": num_heads,
        "K": num_kv_heads,
        "H": head_dim,
        "BT": token_block,
        "BH": head_block,
        "BD": triton.next_power_of_2(-(-head_dim // 2)),
        "ROTATE": cos is not None,
        "HAS_FACTOR": log_n is not None,
        "HAS_B": b is not None,
        "num_warps": num_warps,
    }
    return grid, constants


def forward(
    qkv: Tensor,
    num_heads: int,
    cos: Tensor | None,
    sin: Tensor | None,
    log_n: Tensor | None,
    s: Tensor | None,
    b: Tensor | None,
    tuned: Tiling | None = None,
) -> tuple[Tensor, Tensor]:
    """The rotated q, times its factor, and the rotated k, contiguous and in the dtype of qkv.

    qkv [T, N + 2K, H], contiguous within a token, any stride between tokens. cos, sin [T, H / 2] float32, or None for
    no rotation. log_n [T] float32, s and b [N] of any floating dtype, or None. Products are computed in float32
    and rounded once.
    tuned: replaces `tiling(H)`. Returns q [T, N, H], k [T, K, H]. `rotary_attention` has checked the shapes.
    """
    num_tokens, heads, head_dim = qkv.shape
    q = qkv.new_empty(num_tokens, num_heads, head_dim)
    k = qkv.new_empty(num_tokens, (heads - num_heads) // 2, head_dim)
    grid, constants = _launch(qkv, num_heads, cos, log_n, b, tuned)
    if num_tokens:
        forward_kernel[grid](qkv, q, k, cos, sin, log_n, s, b, num_tokens, qkv.stride(0), **constants)
    return q, k


def backward(
    dq: Tensor,
    dk: Tensor,
    qkv: Tensor,
    dqkv: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    log_n: Tensor | None,
    s: Tensor | None,
    b: Tensor | None,
    factor_grads: bool,
    log_n_grad: bool,
    tuned: Tiling | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Writes the gradients of q and k into dqkv; returns those of log_n [T], s [N] and b [N].

    dq [T, N, H], dk [T, K, H]: gradients of what `forward` returned, contiguous. The arguments that `forward` also has
    must be the ones that it was called with.
    dqkv [T, N + 2K, H]: in the dtype of qkv. Its v part is not touched.
    factor_grads: whether the gradients of s and b are wanted. log_n_grad: whether that of log_n is wanted; those of s
    and b are then computed as well. A gradient that is not computed is empty. dlog_n is float32; ds and db have the
    dtypes of s and b (float32 where None).
    """
    num_tokens, num_heads = qkv.shape[0], dq.shape[1]
    grid, constants = _launch(qkv, num_heads, cos, log_n, b, tuned)
    groups, factor_grads = num_heads // constants["BH"], factor_grads or log_n_grad
    size = num_heads if factor_grads else 0
    ds, db = (qkv.new_empty(size, dtype=torch.float32 if x is None else x.dtype) for x in (s, b))
    sums = qkv.new_empty((2, size, grid[1]), dtype=torch.float32)
    dlog_n = qkv.new_empty((groups, num_tokens) if log_n_grad else 0, dtype=torch.float32)
    if num_tokens:
        tensors = (dq, dk, qkv, dqkv, cos, sin, log_n, s, b, sums, dlog_n)
        strides = (qkv.stride(0), dqkv.stride(0))
        constants |= {"FACTOR_GRAD": factor_grads, "LOG_N_GRAD": log_n_grad}
        backward_kernel[grid](*tensors, num_tokens, *strides, **constants)
    if factor_grads:
        reduce_kernel[(2 * num_heads,)](sums, ds, db, grid[1], num_heads)
    return dlog_n.sum(0) if log_n_grad else dlog_n, ds, db
