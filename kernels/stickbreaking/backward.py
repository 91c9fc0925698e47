"""The backward kernels for float32: two phases without atomics, bitwise reproducible. bf16 and fp16: sixteen/backward.py.

Phase one walks the key tiles of each row block from where forward stopped toward the query, and computes dQ. In this
direction Σ_{i' ≤ i} g_i' is a plain running sum; in the other it would cancel. Phase one stores the carry and this sum
for every (row, key tile). Phase two reads them while it walks down the rows of a key tile for dK and dV. Slices of rows
keep this scratch linear in the number of tokens.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import tile
from .forward import COUNTS, GROUP_BYTES, Config, forward_config, head_group, last_contiguous, launch, sum_types

# Scratch takes 8 bytes per query, head and key tile. Slices keep it under this many bytes per row of the whole.
SCRATCH_BYTES_PER_ROW = 2048


class BackwardConfig(NamedTuple):
    dq: Config
    dkv: Config


def backward_config(head_dim: int) -> BackwardConfig:
    key_block = forward_config(head_dim).key_block
    dq = Config(64 if head_dim <= 64 else 16, key_block, 4, 1)
    return BackwardConfig(dq, dq if head_dim <= 32 else Config(16, key_block, 4 if head_dim <= 64 else 8, 1))


@triton.jit
def _dq_tiles(
    dq, carry, behind, row_tile, q, do, k_ptr, v_ptr, sk_t, sv_t, carry_ptr, behind_ptr,
    scratch_step, first, last, position, num_keys, logit_scale, nearer, farther, dims,
    ROWS: tl.constexpr, BN: tl.constexpr, H: tl.constexpr, BH: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    column_key = tile.key_of_column(BN)
    local = tl.arange(0, ROWS)
    # Hoisted addresses and masks would fill the registers.
    for t in tl.range(first, last, num_stages=1 if MASKED else None, disable_licm=True):
        key = tile.each_round(column_key, t, H)
        first_key = t * tl.full([], BN, tl.int64)
        k_tile = k_ptr + first_key * sk_t + (key[:, None] * sk_t + dims[None, :])
        v_tile = v_ptr + first_key * sv_t + (key[:, None] * sv_t + dims[None, :])
        if MASKED:
            inside = (t * BN + key < num_keys)[:, None] & (dims < H)[None, :]
            k = tl.load(k_tile, mask=inside, other=0.0)
            v = tl.load(v_tile, mask=inside, other=0.0)
        elif H == BH:
            k = tl.load(k_tile)
            v = tl.load(v_tile)
        else:
            k = tl.load(k_tile, mask=(dims < H)[None, :], other=0.0)
            v = tl.load(v_tile, mask=(dims < H)[None, :], other=0.0)
        z = tl.dot(q, tl.trans(k), input_precision=PRECISION) * logit_scale
        u0, u1, u2, u3, w, capped, spent = tile.spend(z, position - t * BN, MASKED, ROWS, BN)
        carry += tl.where(t > row_tile, tl.sum(spent, 1), 0.0)
        entering = tl.where(t < row_tile, -1e30, carry.to(tl.float32))
        scratch = t * scratch_step + local
        tl.store(carry_ptr + scratch, entering)
        tl.store(behind_ptr + scratch, behind)
        rest = entering[:, None] - tile.spent_nearer(spent, nearer, PRECISION) - capped
        a0, a1, a2, a3 = tile.weigh(u0, u1, u2, u3, rest)
        da = tl.dot(do, tl.trans(v), input_precision=PRECISION)
        d0, d1, d2, d3 = tile.quarters(da, ROWS, BN)
        a0, a1, a2, a3 = a0 * d0, a1 * d1, a2 * d2, a3 * d3
        g = (a0 + a1) + (a2 + a3)
        before = behind[:, None] + tile.group_sums(g, farther, PRECISION)
        behind += tl.sum(g, 1)
        a0, a1, a2, a3 = tile.logit_gradients(u0, u1, u2, u3, w, a0, a1, a2, a3, before)
        dq = tile.multiply(tile.whole(a0, a1, a2, a3, ROWS, BN), k, dq, False, 1, PRECISION)
    return dq, carry, behind


@triton.jit(do_not_specialize=COUNTS)
def dq_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, d_rest_ptr, dq_ptr, d_rest_in_ptr, row_carry_ptr, row_tile_ptr, block_stop_ptr, carry_ptr,
    behind_ptr, cu_q_ptr, cu_k_ptr, offset_ptr,
    num_tokens, num_keys_total, num_heads, head_group, num_sequences, first_slot, last_slot, num_stop_slots, num_tiles,
    scratch_rows, sq_t, sq_n, sk_t, sk_n, sv_t, sv_n, so_t, so_n, scale, logit_scale,
    H: tl.constexpr, BH: tl.constexpr, ROWS: tl.constexpr, BN: tl.constexpr, KV_GROUP: tl.constexpr,
    HAS_OFFSET: tl.constexpr, HAS_REST: tl.constexpr, SUM_PARTS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    places = tl.cdiv(last_slot - first_slot, num_sequences) * num_sequences
    head, place = tile.assign(tl.program_id(0), num_heads, head_group, places)
    slice_slot = tile.slot_at(place, last_slot - first_slot, num_sequences, True)
    slot = first_slot + slice_slot
    if slot >= last_slot:
        return
    sequence, block = tile.locate(cu_q_ptr, slot, num_sequences, ROWS)
    q_start, q_len = tile.bounds(cu_q_ptr, sequence, num_tokens)
    k_start, k_len = tile.bounds(cu_k_ptr, sequence, num_keys_total)
    k_len = tl.minimum(k_len, num_tiles * BN)
    if (block < 0) | (block * ROWS >= q_len):
        return
    offset = 0
    if HAS_OFFSET:
        offset = tl.load(offset_ptr + sequence).to(tl.int32)

    local = tl.arange(0, ROWS)
    row = block * ROWS + local
    dims = tl.arange(0, BH)
    row_ok = row < q_len
    in_rows = row_ok[:, None] & (dims < H)[None, :]
    token = (q_start + row).to(tl.int64)
    q = tl.load(q_ptr + token[:, None] * sq_t + head * sq_n + dims[None, :], mask=in_rows, other=0.0)
    do = tl.load(do_ptr + token[:, None] * so_t + head * so_n + dims[None, :], mask=in_rows, other=0.0)
    saved = head.to(tl.int64) * num_tokens + token
    carry = tl.load(row_carry_ptr + saved, mask=row_ok, other=0.0)
    row_tile = tl.load(row_tile_ptr + saved, mask=row_ok, other=tile.NEVER)
    stop = tile.block_stop(block_stop_ptr, cu_q_ptr, sequence, head, block, q_len, num_stop_slots, ROWS)
    # log_rest depends on every key, so its gradient enters the sum at the far end.
    behind = tl.zeros([ROWS], tl.float32)
    if HAS_REST:
        behind = tl.load(d_rest_ptr + token * num_heads + head, mask=row_ok, other=0.0)

    kv_head = head // KV_GROUP
    k_ptr += k_start.to(tl.int64) * sk_t + kv_head * sk_n
    v_ptr += k_start.to(tl.int64) * sv_t + kv_head * sv_n
    scratch_step = tl.full([], 1, tl.int64) * scratch_rows
    scratch = scratch_step * head * num_tiles + slice_slot * ROWS
    position = tl.minimum(offset + row, k_len)
    end = tl.cdiv(tl.minimum(tl.maximum(offset + tl.minimum(block * ROWS + ROWS, q_len) - 1, 0), k_len), BN)
    unmasked = tl.minimum(tl.maximum(offset + block * ROWS, 0), k_len) // BN
    nearer = tile.triangle(BN, True, SUM_PARTS, tl.float32)
    farther = tile.triangle(BN, False, SUM_PARTS, tl.float32)

    dq = tl.zeros([ROWS, BH], tl.float32)
    dq, carry, behind = _dq_tiles(
        dq, carry, behind, row_tile, q, do, k_ptr, v_ptr, sk_t, sv_t, carry_ptr + scratch, behind_ptr + scratch,
        scratch_step, stop, unmasked, position, k_len, logit_scale, nearer, farther, dims,
        ROWS, BN, H, BH, False, PRECISION,
    )  # fmt: skip
    dq, carry, behind = _dq_tiles(
        dq, carry, behind, row_tile, q, do, k_ptr, v_ptr, sk_t, sv_t, carry_ptr + scratch, behind_ptr + scratch,
        scratch_step, tl.maximum(stop, unmasked), end, position, k_len, logit_scale, nearer, farther, dims,
        ROWS, BN, H, BH, True, PRECISION,
    )  # fmt: skip
    dq_ptrs = dq_ptr + (token[:, None] * num_heads + head) * H + dims[None, :]
    tl.store(dq_ptrs, (dq * scale).to(dq_ptr.dtype.element_ty), mask=in_rows)
    tl.store(d_rest_in_ptr + token * num_heads + head, behind, mask=row_ok)


@triton.jit
def _dkv_run(
    dk, dv, k, v, q_ptr, do_ptr, sq_t, sq_n, so_t, so_n, carry_ptr, behind_ptr, scratch_head, head, first, last, t, offset,
    q_len, num_keys, logit_scale, nearer, farther, dims, ROWS: tl.constexpr, BN: tl.constexpr, H: tl.constexpr,
    MASKED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Adds row blocks first … last − 1 of one head to dk and dv."""
    # Addresses follow from the loop counter. After a test or a loaded index, Triton would not pipeline the loads.
    local = tl.arange(0, ROWS)
    for block in tl.range(first, last, num_stages=1 if MASKED else None, disable_licm=True):
        row = tile.each_round(local, block, H)
        q_offsets = row[:, None] * sq_t + dims[None, :]
        do_offsets = row[:, None] * so_t + dims[None, :]
        first_row = block * ROWS
        first64 = first_row.to(tl.int64)
        row_ok = row < q_len - first_row
        in_rows = row_ok[:, None] & (dims < H)[None, :]
        q = tl.load(q_ptr + (first64 * sq_t + head * sq_n) + q_offsets, mask=in_rows, other=0.0)
        do = tl.load(do_ptr + (first64 * so_t + head * so_n) + do_offsets, mask=in_rows, other=0.0)
        scratch = head * scratch_head + first64
        carry = tl.load(carry_ptr + scratch + row, mask=row_ok, other=-1e30)
        behind = tl.load(behind_ptr + scratch + row, mask=row_ok, other=0.0)
        z = tl.dot(q, tl.trans(k), input_precision=PRECISION) * logit_scale
        position = tl.minimum(offset + first_row + row, num_keys)
        u0, u1, u2, u3, w, capped, spent = tile.spend(z, position - t * BN, MASKED, ROWS, BN)
        rest = carry[:, None] - tile.spent_nearer(spent, nearer, PRECISION) - capped
        a0, a1, a2, a3 = tile.weigh(u0, u1, u2, u3, rest)
        dv = tile.multiply(tile.whole(a0, a1, a2, a3, ROWS, BN), do, dv, True, 1, PRECISION)
        da = tl.dot(do, tl.trans(v), input_precision=PRECISION)
        d0, d1, d2, d3 = tile.quarters(da, ROWS, BN)
        a0, a1, a2, a3 = a0 * d0, a1 * d1, a2 * d2, a3 * d3
        before = behind[:, None] + tile.group_sums((a0 + a1) + (a2 + a3), farther, PRECISION)
        a0, a1, a2, a3 = tile.logit_gradients(u0, u1, u2, u3, w, a0, a1, a2, a3, before)
        dk = tile.multiply(tile.whole(a0, a1, a2, a3, ROWS, BN), q, dk, True, 1, PRECISION)
    return dk, dv


@triton.jit(do_not_specialize=COUNTS)
def dkv_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, dk_ptr, dv_ptr, block_stop_ptr, carry_ptr, behind_ptr, list_ptr, cu_q_ptr, cu_k_ptr,
    offset_ptr,
    num_tokens, num_keys_total, num_kv_heads, head_group, num_sequences, first_slot, last_slot, num_key_slots, num_stop_slots,
    num_tiles, scratch_rows, sq_t, sq_n, sk_t, sk_n, sv_t, sv_n, so_t, so_n, scale, logit_scale,
    H: tl.constexpr, BH: tl.constexpr, ROWS: tl.constexpr, DQ_ROWS: tl.constexpr, BN: tl.constexpr, KV_GROUP: tl.constexpr,
    MAX_BLOCKS: tl.constexpr, HAS_OFFSET: tl.constexpr, ADD: tl.constexpr, SUM_PARTS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    places = tl.cdiv(num_key_slots, num_sequences) * num_sequences
    kv_head, place = tile.assign(tl.program_id(0), num_kv_heads, head_group, places)
    slot = tile.slot_at(place, num_key_slots, num_sequences, False)
    if slot >= num_key_slots:
        return
    sequence, t = tile.locate(cu_k_ptr, slot, num_sequences, BN)
    q_start, q_len = tile.bounds(cu_q_ptr, sequence, num_tokens)
    k_start, k_len = tile.bounds(cu_k_ptr, sequence, num_keys_total)
    if (t < 0) | (t * BN >= k_len) | (t >= num_tiles):
        return
    offset = 0
    if HAS_OFFSET:
        offset = tl.load(offset_ptr + sequence).to(tl.int32)

    # The sequence's rows in this slice, and their blocks that attend to this tile: in part, then in whole.
    sequence_slot = tl.load(cu_q_ptr + sequence).to(tl.int32) // DQ_ROWS + sequence
    row_first = tl.maximum((first_slot - sequence_slot) * DQ_ROWS, 0)
    row_last = tl.minimum((last_slot - sequence_slot) * DQ_ROWS, q_len)
    # The list fits the longest announced sequence. Forward has marked longer ones as NaN.
    end_block = tl.minimum(tl.cdiv(row_last, ROWS), row_first // ROWS + MAX_BLOCKS)
    first_row = tl.maximum(tl.maximum(t * BN + 1 - offset, 0), row_first)
    first_block = first_row // ROWS
    whole_from = tl.maximum(tl.cdiv(tl.maximum((t + 1) * BN - offset, 0), ROWS), first_block)
    whole_from = tl.where((t + 1) * BN <= k_len, tl.minimum(whole_from, end_block), end_block)
    if first_row >= row_last:
        if ADD:
            return
        first_block = end_block
        whole_from = end_block

    dims = tl.arange(0, BH)
    key = t * BN + tile.key_of_column(BN)
    in_keys = (key < k_len)[:, None] & (dims < H)[None, :]
    token = (k_start + key).to(tl.int64)
    k = tl.load(k_ptr + token[:, None] * sk_t + kv_head * sk_n + dims[None, :], mask=in_keys, other=0.0)
    v = tl.load(v_ptr + token[:, None] * sv_t + kv_head * sv_n + dims[None, :], mask=in_keys, other=0.0)
    first_head = kv_head * KV_GROUP
    q_ptr += q_start.to(tl.int64) * sq_t + first_head * sq_n
    do_ptr += q_start.to(tl.int64) * so_t + first_head * so_n
    scratch_head = tl.full([], 1, tl.int64) * num_tiles * scratch_rows
    scratch = (
        first_head * scratch_head + tl.full([], 1, tl.int64) * t * scratch_rows + (sequence_slot - first_slot) * DQ_ROWS
    )
    list_ptr += (kv_head.to(tl.int64) * num_key_slots + slot) * (KV_GROUP * (MAX_BLOCKS + 2))
    nearer = tile.triangle(BN, True, SUM_PARTS, tl.float32)
    farther = tile.triangle(BN, False, SUM_PARTS, tl.float32)
    # Blocks are counted from the first block of the slice, so that they fit the scratch of one slice.
    base = row_first // ROWS
    row_base = base * ROWS
    q_ptr += row_base.to(tl.int64) * sq_t
    do_ptr += row_base.to(tl.int64) * so_t
    scratch += row_base
    carry_ptr += scratch
    behind_ptr += scratch

    dk = tl.zeros([BN, BH], tl.float32)
    dv = tl.zeros([BN, BH], tl.float32)
    stops = (block_stop_ptr, cu_q_ptr, sequence)
    runs = tile.list_runs(
        list_ptr, *stops, first_head, base, whole_from, end_block, t, q_len, num_stop_slots, ROWS, KV_GROUP, MAX_BLOCKS
    )
    position = offset + row_base
    rows = q_len - row_base
    # One or two blocks attend to this tile in part, unless offsets do not align with tiles.
    for i in range(KV_GROUP):
        for block in range(first_block, whole_from):
            alive = tile.block_stop(*stops, first_head + i, block, q_len, num_stop_slots, ROWS) <= t
            dk, dv = _dkv_run(
                dk, dv, k, v, q_ptr, do_ptr, sq_t, sq_n, so_t, so_n, carry_ptr, behind_ptr, scratch_head, i, block - base,
                block - base + alive.to(tl.int32), t, position, rows, k_len, logit_scale, nearer, farther, dims, ROWS, BN,
                H, True, PRECISION,
            )  # fmt: skip
    tl.debug_barrier()
    for n in range(runs):
        first = tl.load(list_ptr + 2 * n)
        i = first // MAX_BLOCKS
        last = tl.load(list_ptr + 2 * n + 1) - i * MAX_BLOCKS
        dk, dv = _dkv_run(
            dk, dv, k, v, q_ptr, do_ptr, sq_t, sq_n, so_t, so_n, carry_ptr, behind_ptr, scratch_head, i, first % MAX_BLOCKS,
            last + 1, t, position, rows, k_len, logit_scale, nearer, farther, dims, ROWS, BN, H, False, PRECISION,
        )  # fmt: skip
    dk *= scale
    out = (token[:, None] * num_kv_heads + kv_head) * H + dims[None, :]
    if ADD:
        dk += tl.load(dk_ptr + out, mask=in_keys, other=0.0)
        dv += tl.load(dv_ptr + out, mask=in_keys, other=0.0)
    tl.store(dk_ptr + out, dk.to(dk_ptr.dtype.element_ty), mask=in_keys)
    tl.store(dv_ptr + out, dv.to(dv_ptr.dtype.element_ty), mask=in_keys)


def backward(
    grad_o: Tensor, grad_log_rest: Tensor | None, q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor,
    q_offsets: Tensor | None, row_carry: Tensor, row_tile: Tensor, block_stop: Tensor, maxima: Tensor, max_queries: int,
    max_keys: int, scale: float, config: BackwardConfig | None = None, scratch_bytes_per_row: int = SCRATCH_BYTES_PER_ROW,
    group_bytes: int = GROUP_BYTES,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Runs the backward kernels on float32. maxima: unused, those of bf16. Returns dq, dk, dv and d_log_rest_in."""
    assert q.dtype == torch.float32, q.dtype
    q, k, v, grad_o = (last_contiguous(x) for x in (q, k, v, grad_o))
    num_tokens, num_heads, head_dim = q.shape
    num_keys, num_kv_heads, _ = k.shape
    num_sequences = cu_q.shape[0] - 1
    dq_config, dkv_config = config or backward_config(head_dim)
    rows, key_block = dq_config.row_block, dq_config.key_block
    assert rows % dkv_config.row_block == 0, "a block of phase two must not straddle two slices"
    grad_log_rest = None if grad_log_rest is None else grad_log_rest.float().contiguous()
    dq = torch.empty((num_tokens, num_heads, head_dim), dtype=q.dtype, device=q.device)
    d_rest_in = torch.empty((num_tokens, num_heads), dtype=torch.float32, device=q.device)
    if num_tokens == 0 or num_keys == 0:
        d_rest_in.copy_(torch.zeros_like(d_rest_in) if grad_log_rest is None else grad_log_rest)
        return dq.zero_(), torch.zeros_like(k), torch.zeros_like(v), d_rest_in

    num_tiles = triton.cdiv(max(1, min(max_keys, num_keys)), key_block)
    num_slots = num_tokens // rows + num_sequences
    slice_slots = min(num_slots, max(1, num_slots * scratch_bytes_per_row // (8 * num_tiles)))
    scratch_rows = slice_slots * rows
    carry, behind = torch.empty((2, num_heads, num_tiles, scratch_rows), dtype=torch.float32, device=q.device)
    num_key_slots = num_keys // key_block + num_sequences
    max_blocks = triton.next_power_of_2(triton.cdiv(min(scratch_rows, max(1, max_queries)), dkv_config.row_block))
    group = num_heads // num_kv_heads
    live = torch.empty((num_kv_heads, num_key_slots, group * (max_blocks + 2)), dtype=torch.int32, device=q.device)
    several = slice_slots < num_slots
    dk, dv = (torch.empty(x.shape, dtype=torch.float32 if several else x.dtype, device=x.device) for x in (k, v))
    sums = sum_types(q.dtype, key_block)
    strides = [stride for x in (q, k, v, grad_o) for stride in x.stride()[:2]]
    logit_scale = scale * 1.4426950408889634
    common = {
        "H": head_dim, "BH": max(16, triton.next_power_of_2(head_dim)), "BN": key_block, "KV_GROUP": group,
        "HAS_OFFSET": q_offsets is not None, "SUM_PARTS": sums.nearer_parts, "PRECISION": sums.dot,
    }  # fmt: skip
    for first in range(0, num_slots, slice_slots):
        last = min(first + slice_slots, num_slots)
        dq_kernel[(triton.cdiv(last - first, num_sequences) * num_sequences * num_heads,)](
            q, k, v, grad_o, grad_log_rest, dq, d_rest_in, row_carry, row_tile, block_stop, carry, behind, cu_q, cu_k,
            q_offsets,
            num_tokens, num_keys, num_heads, head_group(k, group, group_bytes), num_sequences, first, last, block_stop.shape[1],
            num_tiles, scratch_rows, *strides, scale, logit_scale,
            ROWS=rows, HAS_REST=grad_log_rest is not None, **launch(dq_config), **common,
        )  # fmt: skip
        dkv_kernel[(triton.cdiv(num_key_slots, num_sequences) * num_sequences * num_kv_heads,)](
            q, k, v, grad_o, dk, dv, block_stop, carry, behind, live, cu_q, cu_k, q_offsets,
            num_tokens, num_keys, num_kv_heads, head_group(q, 1, group_bytes // group), num_sequences, first, last,
            num_key_slots, block_stop.shape[1], num_tiles, scratch_rows, *strides, scale, logit_scale,
            ROWS=dkv_config.row_block, DQ_ROWS=rows, MAX_BLOCKS=max_blocks, ADD=first > 0, **launch(dkv_config), **common,
        )  # fmt: skip
    return dq, dk.to(dq.dtype), dv.to(dq.dtype), d_rest_in
