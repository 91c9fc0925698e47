"""Phase one of the backward pass: walks the key tiles of each row block toward the query and computes dQ.

It starts where forward stopped. For phase two it stores the carry and Σ g over farther keys of every (row, key tile).
"""

import triton
import triton.language as tl

from . import blocks, half, scales, tile
from .launching import begin
from .settings import COUNTS


@triton.jit
def _dq_tiles(
    state, first, last, row_tile, q, do, source, scratch_ptr, scratch_rows, position, num_keys, logit_scale, shift, dz_scale,
    MASKED: tl.constexpr, EXACT: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, H: tl.constexpr, BH: tl.constexpr,
    HALF: tl.constexpr, HOIST: tl.constexpr, PARTS: tl.constexpr, SKIPS: tl.constexpr, HAS_REST: tl.constexpr,
):  # fmt: skip
    """Processes the tiles first … last − 1. state: dq [ROWS, BH]; carry and behind [ROWS, 4]."""
    dq, carry, behind = state
    column_key = tile.key_of_column(KEYS)
    dims = tl.arange(0, BH)
    lane = tile.lanes(carry)
    local = tile.per_row(tl.arange(0, ROWS))
    for t in tl.range(first, last, num_stages=1 if MASKED else None, disable_licm=HOIST < 2 if MASKED else HOIST < 1):
        key = blocks.each_round(column_key, t, H)
        k, v = blocks.load_tiles(source, t, key, num_keys, dims, MASKED, KEYS, H, BH)
        live = t >= row_tile
        # In float32, what is added to the carry must have the bits of what forward has subtracted.
        products = blocks.products(q, k, source, t, key, num_keys, KEYS, H, BH)
        products, scale = tile.scale_live(products, live, logit_scale, SKIPS)
        u, t_, w, after, spent = tile.spend(products, scale, position - t * KEYS, MASKED, EXACT, ROWS)
        nearer, total = tile.lane_sums(spent, True)
        carry += tl.where(t > row_tile, total, 0.0)
        entering = tl.where(live, carry.to(tl.float32), -1e30)
        farther = behind
        if SKIPS and HAS_REST:
            farther = tl.where(live, behind, 0.0)
        if HALF:
            entering += shift
        # Two lanes of a row store the carry, and two the sum, from the threads that hold them.
        scratch = scratch_ptr + tl.full([], 2, tl.int64) * scratch_rows * t + (local + lane % 2 * scratch_rows)
        tile.store_in_place(scratch, tl.where(lane % 2 == 0, entering, farther))
        p = tile.factors(w, after, entering - nearer, dz_scale if HALF else None, EXACT, k.dtype == tl.float32)
        d = tile.dot(do, tl.trans(v))
        da = tile.take_apart(d, ROWS)
        dz, total_gradient = tile.logit_gradients(u, t_, w, p, da, farther, EXACT)
        behind += total_gradient
        dq = tile.multiply(tile.put_together(dz, ROWS), k, dq, False, PARTS)
    return dq, carry, behind


@triton.jit
def _walk(
    state, walk, stop, whole, exact_from, seen, ROWS: tl.constexpr, KEYS: tl.constexpr, H: tl.constexpr, BH: tl.constexpr,
    HALF: tl.constexpr, HOIST: tl.constexpr, PARTS: tl.constexpr, SKIPS: tl.constexpr, HAS_REST: tl.constexpr,
):  # fmt: skip
    """Walks the tiles stop … seen − 1, those from `exact_from` on with the exact algebra. Returns dq, and Σ g over all keys."""
    exact_from = tl.minimum(tl.maximum(exact_from, stop), seen)
    masked_from = tl.minimum(tl.maximum(whole, stop), exact_from)
    state = _dq_tiles(
        state, stop, masked_from, *walk, False, False, ROWS, KEYS, H, BH, HALF, HOIST, PARTS, SKIPS, HAS_REST
    )
    state = _dq_tiles(
        state, masked_from, exact_from, *walk, True, False, ROWS, KEYS, H, BH, HALF, HOIST, PARTS, SKIPS, HAS_REST
    )
    dq, _, behind = _dq_tiles(
        state, exact_from, seen, *walk, True, True, ROWS, KEYS, H, BH, HALF, HOIST, PARTS, SKIPS, HAS_REST
    )
    return dq, behind


@triton.jit
def _gradient_of_rest(d_rest_ptr, places, row_ok, ROWS: tl.constexpr, HAS_REST: tl.constexpr):
    """Returns Σ g before the farthest key [ROWS]: log_rest depends on every key, so its gradient enters at the far end."""
    behind = tl.zeros([ROWS], tl.float32)
    if HAS_REST:
        behind = tl.load(d_rest_ptr + places, mask=row_ok, other=0.0)
    return behind


@triton.jit
def _to_half(q, do, q_half_ptr, do_half_ptr, rows, mask, q_shift, do_shift, BH: tl.constexpr):
    """Stores q and dO in fp16 for phase two. Returns q in fp16."""
    q = half.scaled(q, q_shift)
    tl.store(q_half_ptr + rows, q, mask=mask)
    tl.store(do_half_ptr + rows, half.scaled(do, do_shift), mask=mask)
    if BH > 64:
        # Products take rows from shared memory if they were read, else from registers. With 64 per thread, that is slower.
        tl.debug_barrier()
        q = tl.load(q_half_ptr + rows, mask=mask, other=0.0)
    return q


@triton.jit(do_not_specialize=COUNTS)
def dq_kernel(
    q_ptr, k_ptr, v_ptr, k_descriptor, v_descriptor, do_ptr, q_half_ptr, do_half_ptr, d_rest_ptr, dq_ptr, d_rest_in_ptr,
    row_carry_ptr, row_tile_ptr, block_stop_ptr, scratch_ptr, cu_q_ptr, cu_k_ptr, offset_ptr, maxima_ptr, rest_max_ptr,
    num_tokens, num_keys_total, num_heads, heads_beside, slots_each, num_sequences, first_slot, last_slot, num_stop_slots,
    num_tiles, scratch_rows, sq_t, sq_n, sk_t, sk_n, sv_t, sv_n, so_t, so_n, scale, logit_scale,
    H: tl.constexpr, BH: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, KV_GROUP: tl.constexpr, HAS_OFFSET: tl.constexpr,
    HAS_REST: tl.constexpr, HALF: tl.constexpr, HOIST: tl.constexpr, PARTS: tl.constexpr, SKIPS: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    begin(EARLY)
    head, slice_slot = blocks.assign(heads_beside, num_sequences, slots_each, True)
    if (head >= num_heads) | (first_slot + slice_slot >= last_slot):
        return
    sequence, block = blocks.locate(cu_q_ptr, first_slot + slice_slot, num_sequences, ROWS)
    q_start, q_len, k_start, k_len, offset = blocks.lengths(
        cu_q_ptr, cu_k_ptr, offset_ptr, sequence, num_tokens, num_keys_total, HAS_OFFSET
    )
    k_len = tl.minimum(k_len, num_tiles * KEYS)
    if (block < 0) | (block * ROWS >= q_len):
        return
    position, whole, seen = blocks.visible(block, q_len, k_len, offset, ROWS, KEYS)
    stop, exact_from = blocks.load_stop(block_stop_ptr, cu_q_ptr, sequence, head, block, q_len, num_stop_slots, ROWS)
    row = block * ROWS + tl.arange(0, ROWS)
    row_ok = row < q_len
    dims = tl.arange(0, BH)
    in_rows = row_ok[:, None] & (dims < H)[None, :]
    token = (q_start + row).to(tl.int64)
    out = (token[:, None] * num_heads + head) * H + dims[None, :]
    q = blocks.load_rows(q_ptr, token, sq_t, head, sq_n, row_ok, dims, H)
    do = tl.load(do_ptr + token[:, None] * so_t + head * so_n + dims[None, :], mask=in_rows, other=0.0)
    saved = head.to(tl.int64) * num_tokens + token
    carry = tl.load(row_carry_ptr + saved, mask=row_ok, other=0.0)
    row_tile = tl.load(row_tile_ptr + saved, mask=row_ok, other=blocks.NEVER)
    behind = _gradient_of_rest(d_rest_ptr, token * num_heads + head, row_ok, ROWS, HAS_REST)
    shift, dz_scale, dz_shift = 0.0, 1.0, 0.0
    if HALF:
        q_shift, k_shift, _, do_shift, shift, dz_shift = scales.shifts(maxima_ptr, rest_max_ptr, sequence, BH, HAS_REST)
        q = _to_half(q, do, q_half_ptr, do_half_ptr, out, in_rows, q_shift, do_shift, BH)
        logit_scale *= tl.exp2(-q_shift - k_shift)
        scale *= tl.exp2(-dz_shift - k_shift)
        behind *= tl.exp2(dz_shift)
        dz_scale = tl.exp2(dz_shift - shift)  # of weights to which the shift is added already
    scratch_ptr += tl.full([], 2, tl.int64) * scratch_rows * num_tiles * head + slice_slot * ROWS
    source = (k_ptr, v_ptr, k_descriptor, v_descriptor, sk_t, sk_n, sv_t, sv_n, k_start, head // KV_GROUP)
    state = (tl.zeros([ROWS, BH], tl.float32), tile.per_row(carry), tile.per_row(behind))
    walk = (
        tile.per_row(row_tile), q, do, source, scratch_ptr, scratch_rows, position, k_len, logit_scale, shift, dz_scale,
    )  # fmt: skip
    dq, behind = _walk(
        state, walk, stop, whole, exact_from, seen, ROWS, KEYS, H, BH, HALF, HOIST, PARTS, SKIPS, HAS_REST
    )
    # The compiler does not know that this adds 0. So it keeps no addresses of results in registers during the walk.
    row = (block + (tl.program_id(0) >> 30)) * ROWS + tl.arange(0, ROWS)
    row_ok = row < q_len
    token = (q_start + row).to(tl.int64)
    out = (token[:, None] * num_heads + head) * H + dims[None, :]
    tl.store(dq_ptr + out, (dq * scale).to(dq_ptr.dtype.element_ty), mask=row_ok[:, None] & (dims < H)[None, :])
    tl.store(d_rest_in_ptr + token * num_heads + head, tl.max(behind, 1) * tl.exp2(-dz_shift), mask=row_ok)
