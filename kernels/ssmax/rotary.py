"""The Triton kernels: rotation and factor of q and k forward, and back with the gradients of the factor.

Memory-bound: forward reads q and k out of the fused projection once and writes them once; backward reads their gradients
(and q again where the factor is learned) and writes them into the gradient of the projection.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor


class Config(NamedTuple):
    rows: int  # (token, head) pairs of a program
    num_warps: int


def config(head_dim: int) -> Config:
    """About 8 KiB of bf16 a program: enough bytes in flight on a multiprocessor, 32 values a thread."""
    return Config(max(8, 4096 // triton.next_power_of_2(head_dim)), 4)


def _head_block(num_heads: int, num_kv_heads: int) -> int:
    """Heads of a program: the largest power of two up to 8 that divides both counts."""
    return next(n for n in (8, 4, 2, 1) if num_heads % n == 0 and num_kv_heads % n == 0)


@triton.jit
def _half(ptr, tokens, heads, dims, token_stride, valid, H: tl.constexpr, OFFSET: tl.constexpr, HALF: tl.constexpr):
    """Pointers to one half of each head's values [BT, BH, BD], and which of them exist."""
    offsets = tokens[:, None, None] * token_stride + heads[None, :, None] * H + dims[None, None, :] + OFFSET
    return ptr + offsets, valid[:, None, None] & (dims < HALF)[None, None, :]


@triton.jit
def _load(ptr, tokens, heads, dims, token_stride, valid, H: tl.constexpr, HALF: tl.constexpr):
    """Both halves in float32; the second is 0 where H is odd and it does not exist."""
    first, exists = _half(ptr, tokens, heads, dims, token_stride, valid, H, 0, HALF)
    second, also = _half(ptr, tokens, heads, dims, token_stride, valid, H, HALF, H - HALF)
    return tl.load(first, exists, 0.0).to(tl.float32), tl.load(second, also, 0.0).to(tl.float32)


@triton.jit
def _store(ptr, a, b, tokens, heads, dims, token_stride, valid, H: tl.constexpr, HALF: tl.constexpr):
    first, exists = _half(ptr, tokens, heads, dims, token_stride, valid, H, 0, HALF)
    second, also = _half(ptr, tokens, heads, dims, token_stride, valid, H, HALF, H - HALF)
    tl.store(first, a.to(ptr.dtype.element_ty), exists)
    tl.store(second, b.to(ptr.dtype.element_ty), also)


@triton.jit
def _angles(cos_ptr, sin_ptr, tokens, dims, valid, HALF: tl.constexpr):
    at = tokens[:, None] * HALF + dims[None, :]
    exists = valid[:, None] & (dims < HALF)[None, :]
    return tl.load(cos_ptr + at, exists, 1.0)[:, None, :], tl.load(sin_ptr + at, exists, 0.0)[:, None, :]


@triton.jit
def _factor(base_ptr, s_ptr, b_ptr, tokens, heads, valid, HAS_B: tl.constexpr):
    base = tl.load(base_ptr + tokens, valid, 0.0).to(tl.float32)
    s = tl.load(s_ptr + heads).to(tl.float32)
    factor = base[:, None] * s[None, :]
    if HAS_B:
        factor += tl.load(b_ptr + heads).to(tl.float32)[None, :]
    return base, s, factor


@triton.jit(do_not_specialize=["num_tokens"])
def forward_kernel(
    x_ptr, q_ptr, k_ptr, cos_ptr, sin_ptr, base_ptr, s_ptr, b_ptr, num_tokens, sx_t,
    N: tl.constexpr, K: tl.constexpr, H: tl.constexpr, HALF: tl.constexpr,
    BT: tl.constexpr, BH: tl.constexpr, BD: tl.constexpr,
    ROTATE: tl.constexpr, HAS_FACTOR: tl.constexpr, HAS_B: tl.constexpr,
):  # fmt: skip
    heads = tl.program_id(0) * BH + tl.arange(0, BH)
    tokens = tl.program_id(1).to(tl.int64) * BT + tl.arange(0, BT)
    valid, dims = tokens < num_tokens, tl.arange(0, BD)
    a, b = _load(x_ptr, tokens, heads, dims, sx_t, valid, H, HALF)
    if ROTATE:
        cos, sin = _angles(cos_ptr, sin_ptr, tokens, dims, valid, HALF)
        a, b = a * cos - b * sin, b * cos + a * sin
    is_query = tl.program_id(0) * BH < N
    if is_query:
        if HAS_FACTOR:
            _, _, factor = _factor(base_ptr, s_ptr, b_ptr, tokens, heads, valid, HAS_B)
            a, b = a * factor[:, :, None], b * factor[:, :, None]
        _store(q_ptr, a, b, tokens, heads, dims, N * H, valid, H, HALF)
    else:
        _store(k_ptr, a, b, tokens, heads - N, dims, K * H, valid, H, HALF)


@triton.jit(do_not_specialize=["num_tokens"])
def backward_kernel(
    dq_ptr, dk_ptr, x_ptr, dx_ptr, cos_ptr, sin_ptr, base_ptr, s_ptr, b_ptr, sums_ptr, dbase_ptr, num_tokens, sx_t, sdx_t,
    N: tl.constexpr, K: tl.constexpr, H: tl.constexpr, HALF: tl.constexpr,
    BT: tl.constexpr, BH: tl.constexpr, BD: tl.constexpr,
    ROTATE: tl.constexpr, HAS_FACTOR: tl.constexpr, HAS_B: tl.constexpr, SLOPE: tl.constexpr, BASE_GRAD: tl.constexpr,
):  # fmt: skip
    heads = tl.program_id(0) * BH + tl.arange(0, BH)
    tokens = tl.program_id(1).to(tl.int64) * BT + tl.arange(0, BT)
    valid, dims = tokens < num_tokens, tl.arange(0, BD)
    is_query = tl.program_id(0) * BH < N
    if is_query:
        a, b = _load(dq_ptr, tokens, heads, dims, N * H, valid, H, HALF)
    else:
        a, b = _load(dk_ptr, tokens, heads - N, dims, K * H, valid, H, HALF)
    if ROTATE:  # the inverse rotation
        cos, sin = _angles(cos_ptr, sin_ptr, tokens, dims, valid, HALF)
        a, b = a * cos + b * sin, b * cos - a * sin
    if HAS_FACTOR and is_query:
        base, s, factor = _factor(base_ptr, s_ptr, b_ptr, tokens, heads, valid, HAS_B)
        if SLOPE:
            x, y = _load(x_ptr, tokens, heads, dims, sx_t, valid, H, HALF)
            # The gradient of the factor is dq·R q, which is R⁻¹ dq·q.
            slope = tl.sum(a * x + b * y, 2)  # [BT, BH]
            at = sums_ptr + heads * tl.num_programs(1) + tl.program_id(1)
            tl.store(at, tl.sum(slope * base[:, None], 0))
            tl.store(at + N * tl.num_programs(1), tl.sum(slope, 0))
            if BASE_GRAD:
                at_base = dbase_ptr + tl.program_id(0).to(tl.int64) * num_tokens + tokens
                tl.store(at_base, tl.sum(slope * s[None, :], 1), valid)
        a, b = a * factor[:, :, None], b * factor[:, :, None]
    _store(dx_ptr, a, b, tokens, heads, dims, sdx_t, valid, H, HALF)


@triton.jit(do_not_specialize=["num_blocks"])
def reduce_kernel(sums_ptr, ds_ptr, db_ptr, num_blocks, N: tl.constexpr, BLOCKS: tl.constexpr):
    """ds and db from the sums of each block of tokens, always in the same order."""
    row, total = tl.program_id(0), tl.zeros((BLOCKS,), tl.float32)
    for first in range(0, num_blocks, BLOCKS):
        block = first + tl.arange(0, BLOCKS)
        total += tl.load(sums_ptr + row * num_blocks + block, block < num_blocks, 0.0)
    if row < N:
        tl.store(ds_ptr + row, tl.sum(total, 0).to(ds_ptr.dtype.element_ty))
    else:
        tl.store(db_ptr + row - N, tl.sum(total, 0).to(db_ptr.dtype.element_ty))


def _launch(
    qkv: Tensor, num_heads: int, cos: Tensor | None, base: Tensor | None, b: Tensor | None, tuned: Config | None
) -> tuple[tuple[int, int], dict[str, Any]]:
    """Head groups × token blocks, and the kernels' compile-time constants."""
    total, heads, head_dim = qkv.shape
    num_kv_heads = (heads - num_heads) // 2
    rows, num_warps = tuned or config(head_dim)
    head_block = _head_block(num_heads, num_kv_heads)
    token_block = max(1, rows // head_block)
    half = -(-head_dim // 2)
    grid = ((num_heads + num_kv_heads) // head_block, triton.cdiv(total, token_block))
    constants = {
        "N": num_heads,
        "K": num_kv_heads,
        "H": head_dim,
        "HALF": half,
        "BT": token_block,
        "BH": head_block,
        "BD": triton.next_power_of_2(half),
        "ROTATE": cos is not None,
        "HAS_FACTOR": base is not None,
        "HAS_B": b is not None,
        "num_warps": num_warps,
    }
    return grid, constants


def forward(
    qkv: Tensor,
    num_heads: int,
    cos: Tensor | None,
    sin: Tensor | None,
    base: Tensor | None,
    s: Tensor | None,
    b: Tensor | None,
    tuned: Config | None = None,
) -> tuple[Tensor, Tensor]:
    """q [T, N, H], rotated and times its factor, and k [T, K, H], rotated, from qkv [T, N + 2K, H]."""
    total, heads, head_dim = qkv.shape
    q = qkv.new_empty(total, num_heads, head_dim)
    k = qkv.new_empty(total, (heads - num_heads) // 2, head_dim)
    grid, constants = _launch(qkv, num_heads, cos, base, b, tuned)
    if total:
        forward_kernel[grid](qkv, q, k, cos, sin, base, s, b, total, qkv.stride(0), **constants)
    return q, k


def backward(
    dq: Tensor,
    dk: Tensor,
    qkv: Tensor,
    dqkv: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    base: Tensor | None,
    s: Tensor | None,
    b: Tensor | None,
    slopes: bool,
    base_grad: bool,
    tuned: Config | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Writes the gradients of q and k into dqkv; returns those of base [T], s and b [N].

    slopes: whether those of s and b are asked for; base_grad: that of base too. What is not asked for is empty.
    """
    total, num_heads = qkv.shape[0], dq.shape[1]
    grid, constants = _launch(qkv, num_heads, cos, base, b, tuned)
    groups, slopes = num_heads // constants["BH"], slopes or base_grad
    ds, db = (qkv.new_empty(num_heads if slopes else 0, dtype=torch.float32 if x is None else x.dtype) for x in (s, b))
    sums = qkv.new_empty((2, num_heads, grid[1]) if slopes else 0, dtype=torch.float32)
    dbase = qkv.new_empty((groups, total) if base_grad else 0, dtype=torch.float32)
    if total:
        backward_kernel[grid](
            dq, dk, qkv, dqkv, cos, sin, base, s, b, sums, dbase, total, qkv.stride(0), dqkv.stride(0),
            **constants, SLOPE=slopes, BASE_GRAD=base_grad,
        )  # fmt: skip
    if slopes:
        reduce_kernel[(2 * num_heads,)](sums, ds, db, grid[1], num_heads, 1024, num_warps=4)
    return dbase.sum(0) if base_grad else dbase, ds, db
