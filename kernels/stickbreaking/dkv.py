"""Phase two of the backward pass: walks the row blocks that see a key tile, for all heads of its group: dK and dV."""

import triton
import triton.language as tl

from . import blocks, half, scales, tile
from .launching import begin
from .settings import COUNTS


@triton.jit
def _accumulate(x, y, acc, PARTS: tl.constexpr):
    """Returns acc + xᵀ y. With tiles of 32 keys, acc is transposed: its 64 rows fit wgmma, and the 32 of xᵀ do not."""
    if x.shape[1] == 32:
        acc = tile.dot(tl.trans(y), x, acc)
    else:
        acc = tile.multiply(x, y, acc, True, PARTS)
    return acc


@triton.jit
def _add_products(
    dk, dv, q, do, do_rows, in_rows, v, u, t_, w, after, rest, behind,
    EXACT: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, PARTS: tl.constexpr, SKIPS: tl.constexpr,
    HAS_REST: tl.constexpr,
):  # fmt: skip
    """Adds a row block to dk and dv. rest [ROWS, 4]: log2 of what is left of the sticks."""
    FLOAT32: tl.constexpr = v.dtype == tl.float32
    # The tile of float32 over more than 32 dims. Both parts of each operand are in registers.
    NARROW: tl.constexpr = KEYS == 32
    # The range of float32 gradients is not known, so that they must not be divided by the stick.
    DIVIDE: tl.constexpr = not EXACT and not FLOAT32
    divisor = tl.maximum(rest, tile.LEAST_SKIPPING if SKIPS else tile.LEAST)
    if DIVIDE and not SKIPS:
        rest = divisor
    p = tile.factors(w, after, rest, None, EXACT, FLOAT32)
    a = tile.weigh(t_, p, EXACT)
    # Triton waits for all products before it uses one. So dv comes after dO·v, and runs while dz is computed. Two parts
    # of the weights would not fit the registers beside dO·v. In narrow tiles, dO comes late and dv last, or loops spill.
    if PARTS == 2:
        dv = _accumulate(tile.put_together(a, ROWS), do, dv, PARTS)
    if NARROW:
        do = tl.load(do_rows, mask=in_rows, other=0.0)
    d = tile.dot(do, tl.trans(v))
    da = tile.take_apart(d, ROWS)
    if PARTS == 1 and not NARROW:
        dv = _accumulate(tile.put_together(a, ROWS), do, dv, PARTS)
    if DIVIDE:
        dz = tile.logit_gradients_of_weights(u, w, a, divisor, da, tile.per_row(behind), SKIPS and HAS_REST)
    else:
        dz, _ = tile.logit_gradients(u, t_, w, p, da, tile.per_row(behind), EXACT)
    dk = _accumulate(tile.put_together(dz, ROWS), q, dk, PARTS)
    if NARROW:
        dv = _accumulate(tile.put_together(a, ROWS), do, dv, PARTS)
    return dk, dv


@triton.jit
def _dkv_run(
    state, k, v, q_ptr, do_ptr, sq_t, sq_n, so_t, so_n, carry_ptr, behind_ptr, scratch_head, head, bits, first, last, t, offset,
    q_len, num_keys, logit_scale, MASKED: tl.constexpr, EXACT: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    H: tl.constexpr, BH: tl.constexpr, HOIST: tl.constexpr, PARTS: tl.constexpr, SKIPS: tl.constexpr, HAS_REST: tl.constexpr,
):  # fmt: skip
    """Adds row blocks of one head to state: dk and dv [KEYS, BH], or [BH, 32].

    They are first … last − 1 or, with `bits`, the last − first blocks from `first` on whose bit is set.
    """
    dk, dv = state
    NARROW: tl.constexpr = KEYS == 32
    local = tl.arange(0, ROWS)
    dims = tl.arange(0, BH)
    # Addresses follow from what loops carry. After a test or a loaded index, Triton would not pipeline the loads.
    for n in tl.range(first, last, num_stages=2 if MASKED else None, disable_licm=HOIST < 2 if MASKED else HOIST < 1):
        if bits is None:
            block = n
        else:
            block = first + blocks.lowest(bits)
            bits &= bits - 1
        row = blocks.each_round(local, block, H)
        first_row = block * ROWS
        first64 = first_row.to(tl.int64)
        row_ok = row < q_len - first_row
        in_rows = row_ok[:, None] & (dims < H)[None, :]
        q_rows = q_ptr + (first64 * sq_t + head * sq_n) + (row[:, None] * sq_t + dims[None, :])
        do_rows = do_ptr + (first64 * so_t + head * so_n) + (row[:, None] * so_t + dims[None, :])
        q = tl.load(q_rows, mask=in_rows, other=0.0)
        do = None
        if not NARROW:
            do = tl.load(do_rows, mask=in_rows, other=0.0)
        scratch = head * scratch_head + first64
        carry = tl.load(carry_ptr + scratch + row, mask=row_ok, other=-1e30)
        behind = tl.load(behind_ptr + scratch + row, mask=row_ok, other=0.0)
        live = tile.per_row(carry > -1e29)
        products, scale = tile.scale_live(tile.dot(q, tl.trans(k)), live, logit_scale, SKIPS)
        position = tl.minimum(offset + first_row + row, num_keys)
        u, t_, w, after, spent = tile.spend(products, scale, position - t * KEYS, MASKED, EXACT, ROWS)
        nearer, _ = tile.lane_sums(spent, True)
        dk, dv = _add_products(
            dk, dv, q, do, do_rows, in_rows, v, u, t_, w, after, carry[:, None] - nearer, behind,
            EXACT, ROWS, KEYS, PARTS, SKIPS, HAS_REST,
        )  # fmt: skip
    return dk, dv


@triton.jit
def _row_blocks(
    t, offset, q_len, k_len, cu_q_ptr, sequence, first_slot, last_slot,
    ROWS: tl.constexpr, KEYS: tl.constexpr, DQ_ROWS: tl.constexpr, MAX_BLOCKS: tl.constexpr,
):  # fmt: skip
    """Returns the sequence's first row in this slice, the blocks that see tile t (first, first that sees it as a whole,
    end), and where the slice's rows start in the scratch."""
    sequence_slot = tl.load(cu_q_ptr + sequence).to(tl.int32) // DQ_ROWS + sequence
    row_first = tl.maximum((first_slot - sequence_slot) * DQ_ROWS, 0)
    row_last = tl.minimum((last_slot - sequence_slot) * DQ_ROWS, q_len)
    end = tl.cdiv(row_last, ROWS)
    if MAX_BLOCKS > 0:
        # The list fits the longest announced sequence. Forward has marked longer ones as NaN.
        end = tl.minimum(end, row_first // ROWS + MAX_BLOCKS)
    seen_from = tl.maximum(tl.maximum(t * KEYS + 1 - offset, 0), row_first)
    first = tl.where(seen_from < row_last, seen_from // ROWS, end)
    whole_from = tl.maximum(tl.cdiv(tl.maximum((t + 1) * KEYS - offset, 0), ROWS), first)
    whole_from = tl.where((t + 1) * KEYS <= k_len, tl.minimum(whole_from, end), end)
    return row_first, first, whole_from, end, (sequence_slot - first_slot) * DQ_ROWS


@triton.jit
def _row_strides(sq_t, sq_n, so_t, so_n, H: tl.constexpr, ROW_STRIDE: tl.constexpr):
    if ROW_STRIDE > 0:
        strides = (ROW_STRIDE, H, ROW_STRIDE, H)
    else:
        strides = (sq_t, sq_n, so_t, so_n)
    return strides


@triton.jit(do_not_specialize=COUNTS)
def dkv_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, dk_ptr, dv_ptr, block_stop_ptr, scratch_ptr, list_ptr, cu_q_ptr, cu_k_ptr, offset_ptr,
    maxima_ptr, rest_max_ptr, num_tokens, num_keys_total, num_kv_heads, heads_beside, slots_each, num_sequences,
    first_slot, last_slot, num_key_slots, num_stop_slots, num_tiles, scratch_rows, sq_t, sq_n, sk_t, sk_n, sv_t, sv_n,
    so_t, so_n, scale, logit_scale,
    H: tl.constexpr, BH: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, DQ_ROWS: tl.constexpr, KV_GROUP: tl.constexpr,
    MAX_BLOCKS: tl.constexpr, HAS_OFFSET: tl.constexpr, HAS_REST: tl.constexpr, ADD: tl.constexpr, HALF: tl.constexpr,
    HOIST: tl.constexpr, PARTS: tl.constexpr, SKIPS: tl.constexpr, ROW_STRIDE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    begin(EARLY)
    kv_head, slot = blocks.assign(heads_beside, num_sequences, slots_each, False)
    if (kv_head >= num_kv_heads) | (slot >= num_key_slots):
        return
    sequence, t = blocks.locate(cu_k_ptr, slot, num_sequences, KEYS)
    q_start, q_len, k_start, k_len, offset = blocks.lengths(
        cu_q_ptr, cu_k_ptr, offset_ptr, sequence, num_tokens, num_keys_total, HAS_OFFSET
    )
    if (t < 0) | (t * KEYS >= k_len) | (t >= num_tiles):
        return
    row_first, first, whole_from, end, scratch_row = _row_blocks(
        t, offset, q_len, k_len, cu_q_ptr, sequence, first_slot, last_slot, ROWS, KEYS, DQ_ROWS, MAX_BLOCKS
    )  # fmt: skip
    if ADD & (first >= end):
        return
    key = t * KEYS + tile.key_of_column(KEYS)
    dims = tl.arange(0, BH)
    in_keys = (key < k_len)[:, None] & (dims < H)[None, :]
    token = (k_start + key).to(tl.int64)
    k = tl.load(k_ptr + token[:, None] * sk_t + kv_head * sk_n + dims[None, :], mask=in_keys, other=0.0)
    v = tl.load(v_ptr + token[:, None] * sv_t + kv_head * sv_n + dims[None, :], mask=in_keys, other=0.0)
    dv_scale = 1.0
    if HALF:
        q_shift, k_shift, v_shift, do_shift, weight_shift, dz_shift = scales.shifts(
            maxima_ptr, rest_max_ptr, sequence, BH, HAS_REST
        )
        v = half.scaled(v, v_shift)
        logit_scale *= tl.exp2(-q_shift - k_shift)
        scale *= tl.exp2(-dz_shift - q_shift)
        dv_scale = tl.exp2(-weight_shift - do_shift)
    # Blocks are counted from the first block of the slice, so that they fit the scratch of one slice.
    base, first_head = row_first // ROWS, kv_head * KV_GROUP
    first64 = (q_start + base * ROWS).to(tl.int64)
    scratch_step = tl.full([], 2, tl.int64) * scratch_rows
    scratch_head = scratch_step * num_tiles
    scratch_ptr += first_head * scratch_head + t * scratch_step + (scratch_row + base * ROWS)
    sq_t, sq_n, so_t, so_n = _row_strides(sq_t, sq_n, so_t, so_n, H, ROW_STRIDE)
    rows = (
        k, v, q_ptr + (first64 * sq_t + first_head * sq_n), do_ptr + (first64 * so_t + first_head * so_n), sq_t, sq_n, so_t,
        so_n, scratch_ptr, scratch_ptr + scratch_rows, scratch_head,
    )  # fmt: skip
    keys = (t, offset + base * ROWS, q_len - base * ROWS, k_len, logit_scale)
    dk, dv, visited = _dkv_rows(
        rows, keys, list_ptr, kv_head.to(tl.int64) * num_key_slots + slot, (block_stop_ptr, cu_q_ptr, sequence),
        first_head, base, first, whole_from, end, q_len, num_stop_slots,
        ROWS, KEYS, H, BH, KV_GROUP, MAX_BLOCKS, HOIST, PARTS, SKIPS, HAS_REST,
    )  # fmt: skip
    out, in_keys = _results(t, k_start, k_len, kv_head, num_kv_heads, KEYS, H, BH)
    _store((dk_ptr + out, dv_ptr + out), (dk * scale, dv * dv_scale), in_keys, visited, ADD)


@triton.jit
def _results(t, k_start, k_len, kv_head, num_kv_heads, KEYS: tl.constexpr, H: tl.constexpr, BH: tl.constexpr):
    """Returns the places of a tile's results, and which exist."""
    if BH == 64:  # over more dims, loops would spill
        # The compiler does not know that this adds 0. So it keeps no places in registers during the walk.
        t += tl.program_id(0) >> 30
    key = t * KEYS + tile.key_of_column(KEYS)
    dims = tl.arange(0, BH)
    out = ((k_start + key).to(tl.int64)[:, None] * num_kv_heads + kv_head) * H + dims[None, :]
    return out, (key < k_len)[:, None] & (dims < H)[None, :]


@triton.jit
def _store(pointers, tiles, mask, visited, ADD: tl.constexpr):
    """Stores tiles, or adds them to what the pointers point to, unless they are zero because nothing was `visited`."""
    if ADD:
        mask = mask & (visited > 0)
    for i in tl.static_range(len(tiles)):
        x = tiles[i]
        if ADD:
            x += tl.load(pointers[i], mask=mask, other=0.0)
        tl.store(pointers[i], x.to(pointers[i].dtype.element_ty), mask=mask)


@triton.jit
def _partly_seen(
    state, exact, rows, keys, stops, first_head, base, first, whole_from, q_len, num_stop_slots,
    ROWS: tl.constexpr, KEYS: tl.constexpr, H: tl.constexpr, BH: tl.constexpr, KV_GROUP: tl.constexpr,
    HOIST: tl.constexpr, PARTS: tl.constexpr, SKIPS: tl.constexpr, HAS_REST: tl.constexpr,
):  # fmt: skip
    """Walks the blocks that see part of the tile. Returns state, and `exact`, with bit 0 set if one takes the exact algebra."""
    t = keys[0]
    for i in range(KV_GROUP):
        # One or two blocks see this tile in part, unless offsets do not align with tiles.
        for block in range(first, whole_from):
            stop, exact_from = blocks.load_stop(*stops, first_head + i, block, q_len, num_stop_slots, ROWS)
            exact |= (t >= exact_from).to(tl.int32)
            end_of_run = block - base + ((stop <= t) & (t < exact_from)).to(tl.int32)
            state = _dkv_run(
                state, *rows, i, None, block - base, end_of_run, *keys, True, False,
                ROWS, KEYS, H, BH, HOIST, PARTS, SKIPS, HAS_REST,
            )  # fmt: skip
    return state, exact


@triton.jit
def _by_words(
    state, rows, keys, stops, first_head, base, first, whole_from, end, q_len, num_stop_slots,
    ROWS: tl.constexpr, KEYS: tl.constexpr, H: tl.constexpr, BH: tl.constexpr, KV_GROUP: tl.constexpr,
    HOIST: tl.constexpr, PARTS: tl.constexpr, SKIPS: tl.constexpr, HAS_REST: tl.constexpr,
):  # fmt: skip
    """Walks the live row blocks in the order of bits in words. Returns state and how many row blocks it may have visited."""
    state, exact = _partly_seen(
        state, tl.full([], 0, tl.int32), rows, keys, stops, first_head, base, first, whole_from, q_len, num_stop_slots,
        ROWS, KEYS, H, BH, KV_GROUP, HOIST, PARTS, SKIPS, HAS_REST,
    )  # fmt: skip
    visited = whole_from - first
    exact_end = tl.where(exact > 0, whole_from, first)
    for i in range(KV_GROUP):
        for start in range(whole_from, end, blocks.WORD):
            bits, count, last = blocks.live_blocks(
                stops, first_head + i, start, end, keys[0], q_len, num_stop_slots, False, ROWS
            )  # fmt: skip
            visited += count
            exact_end = tl.maximum(exact_end, last)
            state = _dkv_run(
                state, *rows, i, bits, start - base, start - base + count, *keys, False, False,
                ROWS, KEYS, H, BH, HOIST, PARTS, SKIPS, HAS_REST,
            )  # fmt: skip
    for i in range(KV_GROUP):
        for start in range(first, exact_end, blocks.WORD):
            bits, count, _ = blocks.live_blocks(
                stops, first_head + i, start, end, keys[0], q_len, num_stop_slots, True, ROWS
            )  # fmt: skip
            state = _dkv_run(
                state, *rows, i, bits, start - base, start - base + count, *keys, True, True,
                ROWS, KEYS, H, BH, HOIST, PARTS, SKIPS, HAS_REST,
            )  # fmt: skip
    return state, visited + (exact_end - first)


@triton.jit
def _by_list(
    state, rows, keys, list_ptr, stops, first_head, base, first, whole_from, end, q_len, num_stop_slots,
    ROWS: tl.constexpr, KEYS: tl.constexpr, H: tl.constexpr, BH: tl.constexpr, KV_GROUP: tl.constexpr, MAX_BLOCKS: tl.constexpr,
    HOIST: tl.constexpr, PARTS: tl.constexpr, SKIPS: tl.constexpr, HAS_REST: tl.constexpr,
):  # fmt: skip
    """Walks the runs of live row blocks that it lists first. Returns state and how many runs and blocks it has visited."""
    t = keys[0]
    runs, exact = blocks.list_runs(
        list_ptr, stops, first_head, base, whole_from, end, t, q_len, num_stop_slots, ROWS, KV_GROUP, MAX_BLOCKS
    )
    state, exact = _partly_seen(
        state, exact, rows, keys, stops, first_head, base, first, whole_from, q_len, num_stop_slots,
        ROWS, KEYS, H, BH, KV_GROUP, HOIST, PARTS, SKIPS, HAS_REST,
    )  # fmt: skip
    tl.debug_barrier()
    for n in range(runs):
        start = tl.load(list_ptr + 2 * n)
        i = start // MAX_BLOCKS
        last = tl.load(list_ptr + 2 * n + 1) - i * MAX_BLOCKS
        state = _dkv_run(
            state, *rows, i, None, start % MAX_BLOCKS, last + 1, *keys, False, False,
            ROWS, KEYS, H, BH, HOIST, PARTS, SKIPS, HAS_REST,
        )  # fmt: skip
    near_end = tl.minimum(whole_from + blocks.NEAR, end)
    exact_end = tl.where(exact == 0, first, tl.where(exact == 1, near_end, end))
    for i in range(KV_GROUP):
        for block in range(first, exact_end):
            stop, exact_from = blocks.load_stop(*stops, first_head + i, block, q_len, num_stop_slots, ROWS)
            end_of_run = block - base + ((stop <= t) & (t >= exact_from)).to(tl.int32)
            state = _dkv_run(
                state, *rows, i, None, block - base, end_of_run, *keys, True, True,
                ROWS, KEYS, H, BH, HOIST, PARTS, SKIPS, HAS_REST,
            )  # fmt: skip
    return state, runs + (exact_end - first) + (whole_from - first)


@triton.jit
def _dkv_rows(
    rows, keys, list_ptr, list_number, stops, first_head, base, first, whole_from, end, q_len, num_stop_slots,
    ROWS: tl.constexpr, KEYS: tl.constexpr, H: tl.constexpr, BH: tl.constexpr, KV_GROUP: tl.constexpr, MAX_BLOCKS: tl.constexpr,
    HOIST: tl.constexpr, PARTS: tl.constexpr, SKIPS: tl.constexpr, HAS_REST: tl.constexpr,
):  # fmt: skip
    """Walks the row blocks that see a key tile, for all heads of its group. MAX_BLOCKS of 0: by words, else by a list.

    Returns dk, dv, and 0 if they are zero because no row block has any stick left at the tile.
    """
    zeros = tl.zeros([BH, KEYS] if KEYS == 32 else [KEYS, BH], tl.float32)
    state = (zeros, zeros)
    if MAX_BLOCKS == 0:
        state, visited = _by_words(
            state, rows, keys, stops, first_head, base, first, whole_from, end, q_len, num_stop_slots,
            ROWS, KEYS, H, BH, KV_GROUP, HOIST, PARTS, SKIPS, HAS_REST,
        )  # fmt: skip
    else:
        list_ptr += list_number * (KV_GROUP * (MAX_BLOCKS + 2))
        state, visited = _by_list(
            state, rows, keys, list_ptr, stops, first_head, base, first, whole_from, end, q_len, num_stop_slots,
            ROWS, KEYS, H, BH, KV_GROUP, MAX_BLOCKS, HOIST, PARTS, SKIPS, HAS_REST,
        )  # fmt: skip
    dk, dv = state
    if KEYS == 32:
        dk = tl.trans(dk)
        dv = tl.trans(dv)
    return dk, dv, visited
