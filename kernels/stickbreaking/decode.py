"""Decoding: attention of one or a few new tokens per sequence to its cache, split over the keys.

Each split starts with a whole stick, stops when its rows have spent it, and returns (o, log rest). The merge goes
through the splits from the nearest to the farthest and scales each by what the nearer ones left. All query heads of a
key head share one tile, so K and V are read once.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import tile
from .forward import COUNTS, Config, last_contiguous, launch, log2_threshold, sum_types, walk_tiles

# Enough programs to fill 132 multiprocessors eight times. A split of fewer than MIN_TILES tiles is not worth its merge.
TARGET_PROGRAMS = 1056
MIN_TILES = 4


def decode_config(rows: int, head_dim: int, dtype: torch.dtype) -> Config:
    """Returns launch settings for queries × heads per key head. More than two warps where the loops of two would spill.

    Two warps with three stages were measured on an H200, for 16 rows of 64 dims in bf16.
    """
    rows, padded = (max(16, triton.next_power_of_2(x)) for x in (rows, head_dim))
    if dtype == torch.float32:
        if padded > 64:
            return Config(64, 32, 4, 1) if rows > 16 else Config(16, 64, 8, 1)
        return Config(rows, 64, 2 if padded <= 32 and rows <= 32 else 4, 1)
    return Config(rows, 64, 2 if rows * padded <= 2048 else 4, 3)


@triton.jit(do_not_specialize=COUNTS)
def split_kernel(
    q_ptr, k_ptr, v_ptr, o_ptr, rest_ptr, cu_q_ptr, cu_k_ptr, offset_ptr,
    num_tokens, num_keys_total, num_heads, sq_t, sq_n, sk_t, sk_n, sv_t, sv_n, logit_scale, threshold,
    H: tl.constexpr, BH: tl.constexpr, ROWS: tl.constexpr, BN: tl.constexpr, KV_GROUP: tl.constexpr, CHUNK: tl.constexpr,
    HAS_OFFSET: tl.constexpr, NEARER: tl.constexpr, NEARER_PARTS: tl.constexpr, PARTS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    split = tl.program_id(0)
    num_splits = tl.num_programs(0)
    kv_head = tl.program_id(1)
    sequence = tl.program_id(2)
    q_start, q_len = tile.bounds(cu_q_ptr, sequence, num_tokens)
    k_start, k_len = tile.bounds(cu_k_ptr, sequence, num_keys_total)
    offset = 0
    if HAS_OFFSET:
        offset = tl.load(offset_ptr + sequence).to(tl.int32)

    local = tl.arange(0, ROWS)
    row = local // KV_GROUP
    head = kv_head * KV_GROUP + local % KV_GROUP
    dims = tl.arange(0, BH)
    row_ok = row < q_len
    in_rows = row_ok[:, None] & (dims < H)[None, :]
    token = (q_start + row).to(tl.int64)
    q = tl.load(q_ptr + (token * sq_t + head * sq_n)[:, None] + dims[None, :], mask=in_rows, other=0.0)
    column_key = tile.key_of_column(BN)
    k_ptr += k_start.to(tl.int64) * sk_t + kv_head * sk_n
    v_ptr += k_start.to(tl.int64) * sv_t + kv_head * sv_n
    k_offsets = column_key[:, None] * sk_t + dims[None, :]
    v_offsets = column_key[:, None] * sv_t + dims[None, :]
    tile_step = tl.full([], BN, tl.int64)

    position = tl.minimum(offset + row, k_len)
    end = tl.cdiv(tl.minimum(tl.maximum(offset + q_len - 1, 0), k_len), BN)
    per_split = tl.cdiv(end, num_splits)
    last = tl.maximum(end - split * per_split, 0)
    first = tl.maximum(last - per_split, 0)
    unmasked = tl.maximum(tl.minimum(tl.minimum(tl.maximum(offset, 0), k_len) // BN, last), first)

    carry = tl.where(row_ok, 0.0, -1e30)
    row_tile = tl.zeros([ROWS], tl.int32)
    acc = tl.zeros([ROWS, BH], tl.float32)
    nearer = tile.triangle(BN, True, NEARER_PARTS, NEARER)
    acc, carry, _, _ = walk_tiles(
        acc, carry, carry, row_tile, q, k_ptr, v_ptr, k_offsets, v_offsets, tile_step * sk_t, tile_step * sv_t, last - 1,
        last - unmasked, position, k_len,
        logit_scale, tile.DEAD, nearer, dims, ROWS, BN, H, BH, True, PARTS, PRECISION,
    )  # fmt: skip
    t = unmasked - 1
    while (t >= first) & (tl.max(carry, 0) >= threshold):
        count = tl.minimum(t + 1 - first, CHUNK)
        acc, carry, _, _ = walk_tiles(
            acc, carry, carry, row_tile, q, k_ptr, v_ptr, k_offsets, v_offsets, tile_step * sk_t, tile_step * sv_t, t, count,
            position, k_len,
            logit_scale, tile.DEAD, nearer, dims, ROWS, BN, H, BH, False, PARTS, PRECISION,
        )  # fmt: skip
        t -= count
    out = (split.to(tl.int64) * num_tokens + token) * num_heads + head
    tl.store(o_ptr + out[:, None] * H + dims[None, :], acc, mask=in_rows)
    tl.store(rest_ptr + out, carry, mask=row_ok)


@triton.jit
def merge_kernel(
    part_ptr, part_rest_ptr, log_rest_in_ptr, o_ptr, log_rest_ptr, num_rows, num_splits,
    H: tl.constexpr, BH: tl.constexpr, HAS_REST: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    dims = tl.arange(0, BH)
    rest = tl.zeros([], tl.float32)
    if HAS_REST:
        rest = tl.load(log_rest_in_ptr + row).to(tl.float32) * tile.LOG2_E
    acc = tl.zeros([BH], tl.float32)
    for _ in range(num_splits):
        acc += tl.exp2(rest) * tl.load(part_ptr + row * H + dims, mask=dims < H, other=0.0)
        rest += tl.load(part_rest_ptr + row)
        row += num_rows
    row -= tl.full([], 1, tl.int64) * num_rows * num_splits
    tl.store(o_ptr + row * H + dims, acc.to(o_ptr.dtype.element_ty), mask=dims < H)
    tl.store(log_rest_ptr + row, rest * tile.LN_2)


def decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_q: Tensor,
    cu_k: Tensor,
    q_offsets: Tensor | None,
    log_rest_in: Tensor | None,
    max_queries: int,
    max_keys: int,
    scale: float,
    skip_below: float,
    num_splits: int | None = None,
    config: Config | None = None,
) -> tuple[Tensor, Tensor]:
    q, k, v = last_contiguous(q), last_contiguous(k), last_contiguous(v)
    num_tokens, num_heads, head_dim = q.shape
    num_kv_heads = k.shape[1]
    group = num_heads // num_kv_heads
    num_sequences = cu_q.shape[0] - 1
    config = config or decode_config(max_queries * group, head_dim, q.dtype)
    o = torch.empty((num_tokens, num_heads, head_dim), dtype=q.dtype, device=q.device)
    log_rest = torch.empty((num_tokens, num_heads), dtype=torch.float32, device=q.device)
    if num_tokens == 0:
        return o, log_rest
    if num_splits is None:
        wanted = triton.cdiv(TARGET_PROGRAMS, num_kv_heads * num_sequences)
        num_splits = max(1, min(wanted, triton.cdiv(max_keys, MIN_TILES * config.key_block)))
    part = torch.empty((num_splits, num_tokens, num_heads, head_dim), dtype=torch.float32, device=q.device)
    part_rest = torch.empty((num_splits, num_tokens, num_heads), dtype=torch.float32, device=q.device)
    sums = sum_types(q.dtype, config.key_block)
    padded = max(16, triton.next_power_of_2(head_dim))
    split_kernel[(num_splits, num_kv_heads, num_sequences)](
        q, k, v, part, part_rest, cu_q, cu_k, q_offsets,
        num_tokens, k.shape[0], num_heads, q.stride(0), q.stride(1), k.stride(0), k.stride(1), v.stride(0), v.stride(1),
        scale * 1.4426950408889634, log2_threshold(skip_below),
        H=head_dim, BH=padded, ROWS=config.row_block, BN=config.key_block, KV_GROUP=group, CHUNK=4,
        HAS_OFFSET=q_offsets is not None, NEARER=sums.nearer, NEARER_PARTS=sums.nearer_parts, PARTS=sums.parts,
        PRECISION=sums.dot,
        **launch(config),
    )  # fmt: skip
    merge_kernel[(num_tokens * num_heads,)](
        part, part_rest, None if log_rest_in is None else log_rest_in.contiguous(), o, log_rest, num_tokens * num_heads,
        num_splits,
        H=head_dim, BH=padded, HAS_REST=log_rest_in is not None, num_warps=1,
    )  # fmt: skip
    return o, log_rest
