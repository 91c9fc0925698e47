"""The Triton kernels over a paged key/value cache: prefill of float32, decode split over the keys, and the merge of the
splits. sixteen/prefill.py is the prefill of bf16 and fp16.

Key j of a sequence is in slot j % BS of block table[j // BS], where BS is the block size. Tiles of BN keys are walked
as in forward.py and decode.py. `advance` is the algebra of a tile; the rest of this file only finds the tiles.
"""

import triton
import triton.language as tl

from . import tile

# Counts vary between batches. Triton must not compile again when one of them is 1 or a multiple of 16.
COUNTS = (
    "num_tokens", "num_heads", "num_kv_heads", "num_sequences", "num_slots", "num_splits", "max_blocks", "head_group",
    "split_queries", "first_chunk", "chunk", "st_b",
)  # fmt: skip


@triton.jit
def advance(
    acc, carry, q, k, v, limit, logit_scale, nearer,
    MASKED: tl.constexpr, ROWS: tl.constexpr, BN: tl.constexpr, PARTS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Returns acc and carry after one more tile, the next farther one.

    acc [ROWS, BH]: Σ A_ij v_i. carry [ROWS]: log2 of the stick that is left. q [ROWS, BH]; k, v [BN, BH], whose rows
    are in the order of `tile.key_of_column`. MASKED: row i attends only to the first limit[i] keys.
    """
    z = tl.dot(q, tl.trans(k), input_precision=PRECISION) * logit_scale
    u0, u1, u2, u3, _, capped, spent = tile.spend(z, limit, MASKED, ROWS, BN)
    rest = carry[:, None] - tile.spent_nearer(spent, nearer, PRECISION) - capped
    a0, a1, a2, a3 = tile.weigh(u0, u1, u2, u3, rest)
    weights = tile.whole(a0, a1, a2, a3, ROWS, BN)
    return multiply(weights, v, acc, PARTS, PRECISION), carry - tl.sum(spent, 1)


@triton.jit
def multiply(x, y, acc, PARTS: tl.constexpr, PRECISION: tl.constexpr):
    """Returns acc + x y, as `tile.multiply` does. Two parts of bf16 are split by truncation."""
    if PARTS == 2 and y.dtype == tl.bfloat16:
        # As in `tile.group_sums`: truncating the bits is exact, and converting back would run at an eighth of the rate.
        high = (x.to(tl.int32, bitcast=True) & -65536).to(tl.float32, bitcast=True)
        acc = tl.dot(high.to(y.dtype), y, acc)
        acc = tl.dot((x - high).to(y.dtype), y, acc)
    else:
        acc = tile.multiply(x, y, acc, False, PARTS, PRECISION)
    return acc


@triton.jit
def blocks_of(table_ptr, t, max_blocks, BN: tl.constexpr, BS: tl.constexpr):
    """Returns the blocks of tile t as a tuple: one number per block that the tile spans, or one tensor [BN].

    For t = −1 and for blocks after the sequence's last one, these are some other numbers.
    """
    # Clamping costs less than masks. Numbers need no exchange between threads, unlike a tensor that is loaded.
    t = tl.maximum(t, 0)
    if BS % BN == 0:
        blocks = (tl.load(table_ptr + tl.minimum(t * BN // BS, max_blocks - 1)),)
    elif BN % BS == 0 and BS // tile.GROUP * tile.GROUP == BS:
        blocks = (tl.load(table_ptr + tl.minimum(t * (BN // BS), max_blocks - 1)),)
        for i in tl.static_range(1, BN // BS):
            block = tl.load(table_ptr + tl.minimum(t * (BN // BS) + i, max_blocks - 1))
            # Triton does not unpack tuples.
            blocks = blocks + (block,)  # type: ignore[assignment]  # noqa: RUF005
    else:
        blocks = (tl.load(table_ptr + tl.minimum((t * BN + tile.key_of_column(BN)) // BS, max_blocks - 1)),)
    return blocks


@triton.jit
def rows_of(blocks, t, dims, BLOCK: tl.constexpr, BN: tl.constexpr, BS: tl.constexpr, SLOT: tl.constexpr):
    """Returns where the keys of tile t are in the cache: three numbers or tensors to add to its pointer in this order.

    The order and the strides, which are constants, let a thread compute one or two addresses, from which all others are
    at constant distances.
    """
    group = tl.arange(0, BN) % (BN // tile.GROUP)
    inside = tl.arange(0, BN) // (BN // tile.GROUP)  # key_of_column is GROUP · group + inside
    if BS % BN == 0:
        first = blocks[0].to(tl.int64) * BLOCK + t * BN % BS * SLOT
        then = (group * (tile.GROUP * SLOT))[:, None] + dims[None, :]
        last = (inside * SLOT)[:, None]
    elif BN % BS == 0 and BS // tile.GROUP * tile.GROUP == BS:
        block = tl.zeros([BN], blocks[0].dtype) + blocks[0]
        for i in tl.static_range(1, BN // BS):
            block = tl.where(group // (BS // tile.GROUP) == i, blocks[i], block)
        first = (block.to(tl.int64) * BLOCK)[:, None]
        then = (group % (BS // tile.GROUP) * (tile.GROUP * SLOT))[:, None] + dims[None, :]
        last = (inside * SLOT)[:, None]
    else:
        first = (blocks[0].to(tl.int64) * BLOCK)[:, None]
        then = ((t * BN + tile.key_of_column(BN)) % BS * SLOT)[:, None] + dims[None, :]
        last = 0
    return first, then, last


@triton.jit
def walk(
    acc, carry, blocks, q, cache, newest, count, position, num_keys, logit_scale, nearer, dims,
    MASKED: tl.constexpr, PIPELINED: tl.constexpr, H: tl.constexpr, BH: tl.constexpr, ROWS: tl.constexpr,
    BN: tl.constexpr, BS: tl.constexpr, BLOCK: tl.constexpr, SLOT: tl.constexpr, BESIDE: tl.constexpr,
    PARTS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Returns acc and carry after `count` tiles from tile `newest` on, toward lower indices.

    blocks: `blocks_of` tile `newest`.
    """
    k_ptr, v_ptr, table_ptr, max_blocks = cache
    column_key = tile.key_of_column(BN)
    three_passes: tl.constexpr = PRECISION == "tf32x3"  # hoisted values would fill the registers
    for step in tl.range(count, num_stages=None if PIPELINED else 1, disable_licm=three_passes):
        t = newest - step
        first, then, last = rows_of(blocks, t, dims, BLOCK, BN, BS, SLOT)
        # The blocks of a tile are looked up one tile ahead, so that the loads of keys do not wait for them. They are
        # not used after the loop: for that, Triton would wait for them in every iteration.
        blocks = blocks_of(table_ptr, t - 1, max_blocks, BN, BS)
        k_rows = k_ptr + first + then + last
        v_rows = k_rows + H if BESIDE else v_ptr + first + then + last
        if MASKED:
            inside = (column_key < num_keys - t * BN)[:, None] & (dims < H)[None, :]
            k = tl.load(k_rows, mask=inside, other=0.0)
            v = tl.load(v_rows, mask=inside, other=0.0)
        elif H == BH:
            k = tl.load(k_rows)
            v = tl.load(v_rows)
        else:
            k = tl.load(k_rows, mask=(dims < H)[None, :], other=0.0)
            v = tl.load(v_rows, mask=(dims < H)[None, :], other=0.0)
        acc, carry = advance(
            acc, carry, q, k, v, position - t * BN, logit_scale, nearer, MASKED, ROWS, BN, PARTS, PRECISION
        )  # fmt: skip
    return acc, carry


@triton.jit
def sweep(
    carry, q, cache, position, num_keys, last, unmasked, first, first_chunk, chunk, logit_scale, threshold,
    H: tl.constexpr, BH: tl.constexpr, ROWS: tl.constexpr, BN: tl.constexpr, BS: tl.constexpr,
    BLOCK: tl.constexpr, SLOT: tl.constexpr,
    BESIDE: tl.constexpr, ONE_LOOP: tl.constexpr, NEARER: tl.constexpr, NEARER_PARTS: tl.constexpr, PARTS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Walks the tiles last − 1 to first until every stick is below the threshold. Returns acc and carry.

    Tiles below `unmasked` are visible to all rows as a whole. They take a loop of their own, which tests no positions,
    unless ONE_LOOP: a second loop starts with an empty pipeline.
    """
    dims = tl.arange(0, BH)
    acc = tl.zeros([ROWS, BH], tl.float32)
    nearer = tile.triangle(BN, True, NEARER_PARTS, NEARER)
    t = last - 1
    blocks = blocks_of(cache[2], t, cache[3], BN, BS)
    if not ONE_LOOP:
        t = unmasked - 1
        further = blocks_of(cache[2], t, cache[3], BN, BS)
        acc, carry = walk(
            acc, carry, blocks, q, cache, last - 1, last - unmasked, position, num_keys, logit_scale, nearer, dims,
            True, False, H, BH, ROWS, BN, BS, BLOCK, SLOT, BESIDE, PARTS, PRECISION,
        )  # fmt: skip
        blocks = further
    # As in forward.py, the exit is tested once per chunk, and the next chunk is as long as the fullest stick lasts.
    fullest = tl.max(carry, 0)
    ahead = first_chunk
    while (t >= first) & (fullest >= threshold):
        count = tl.minimum(t + 1 - first, ahead)
        acc, carry = walk(
            acc, carry, blocks, q, cache, t, count, position, num_keys, logit_scale, nearer, dims,
            ONE_LOOP, True, H, BH, ROWS, BN, BS, BLOCK, SLOT, BESIDE, PARTS, PRECISION,
        )  # fmt: skip
        t -= count
        blocks = blocks_of(cache[2], t, cache[3], BN, BS)
        left = tl.max(carry, 0)
        lasts = (left - threshold) * count / tl.maximum(fullest - left, 1e-6)
        ahead = tl.minimum(lasts, chunk - 1.0).to(tl.int32) + 1
        fullest = left
    return acc, carry


@triton.jit
def lengths(cu_q_ptr, seq_lens_ptr, sequence, num_tokens, max_blocks, BS: tl.constexpr):
    """Returns a sequence's first token, its number of new tokens, its number of keys and its first new position."""
    q_start, q_len = tile.bounds(cu_q_ptr, sequence, num_tokens)
    seq_len = tl.load(seq_lens_ptr + sequence).to(tl.int32)
    return q_start, q_len, tl.minimum(tl.maximum(seq_len, 0), max_blocks * BS), seq_len - q_len


@triton.jit
def own_values(
    v_ptr, table_ptr, position, num_keys, dims,
    H: tl.constexpr, BS: tl.constexpr, BLOCK: tl.constexpr, SLOT: tl.constexpr,
):  # fmt: skip
    """Returns the values at `position` [R] as float32 [R, BH]; zeros for positions that are not in the cache."""
    held = (position >= 0) & (position < num_keys)
    blocks = tl.load(table_ptr + position // BS, mask=held, other=0).to(tl.int64)
    rows = v_ptr + blocks * BLOCK + position % BS * SLOT
    return tl.load(rows[:, None] + dims[None, :], mask=held[:, None] & (dims < H)[None, :], other=0.0).to(tl.float32)


@triton.jit
def write(
    acc, carry, o_ptr, log_rest_ptr, out, row_ok, cache, position, num_keys, dims,
    H: tl.constexpr, BS: tl.constexpr, BLOCK: tl.constexpr, SLOT: tl.constexpr, REMAINDER: tl.constexpr,
):  # fmt: skip
    """Writes the results of the rows at `position` to row `out` of o and log_rest."""
    if REMAINDER:
        own = own_values(cache[1], cache[2], position, num_keys, dims, H, BS, BLOCK, SLOT)
        acc += tl.exp2(carry)[:, None] * own
    in_rows = row_ok[:, None] & (dims < H)[None, :]
    tl.store(o_ptr + out[:, None] * H + dims[None, :], acc.to(o_ptr.dtype.element_ty), mask=in_rows)
    tl.store(log_rest_ptr + out, carry * tile.LN_2, mask=row_ok)


@triton.jit
def shares(q_len, num_keys, offset, num_splits, BN: tl.constexpr):
    """Returns the number of tiles that any new token attends to, and how many of them are one split's."""
    tiles = tl.cdiv(tl.minimum(tl.maximum(offset + q_len - 1, 0), num_keys), BN)
    return tiles, tl.cdiv(tiles, num_splits)


@triton.jit(do_not_specialize=COUNTS)
def prefill_kernel(
    q_ptr, k_ptr, v_ptr, table_ptr, o_ptr, log_rest_ptr, cu_q_ptr, seq_lens_ptr,
    num_tokens, num_heads, num_sequences, num_slots, max_blocks, head_group, split_queries, first_chunk, chunk,
    sq_t, sq_n, sc_n, st_b, logit_scale, threshold,
    H: tl.constexpr, BH: tl.constexpr, ROWS: tl.constexpr, BN: tl.constexpr, BS: tl.constexpr,
    BLOCK: tl.constexpr, SLOT: tl.constexpr,
    BESIDE: tl.constexpr, KV_GROUP: tl.constexpr,
    REMAINDER: tl.constexpr, NEARER: tl.constexpr, NEARER_PARTS: tl.constexpr, PARTS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """ROWS queries of one head, in float32. Leaves sequences of up to `split_queries` queries to split_kernel."""
    places = tl.cdiv(num_slots, num_sequences) * num_sequences
    head, place = tile.assign(tl.program_id(0), num_heads, head_group, places)
    slot = tile.slot_at(place, num_slots, num_sequences, True)
    if slot >= num_slots:
        return
    sequence, block = tile.locate(cu_q_ptr, slot, num_sequences, ROWS)
    q_start, q_len, num_keys, offset = lengths(cu_q_ptr, seq_lens_ptr, sequence, num_tokens, max_blocks, BS)
    if (block < 0) | (block * ROWS >= q_len) | (q_len <= split_queries):
        return
    row = block * ROWS + tl.arange(0, ROWS)
    dims = tl.arange(0, BH)
    row_ok = row < q_len
    in_rows = row_ok[:, None] & (dims < H)[None, :]
    token = (q_start + row).to(tl.int64)
    q = tl.load(q_ptr + token[:, None] * sq_t + head * sq_n + dims[None, :], mask=in_rows, other=0.0)
    kv_head = head // KV_GROUP
    table_ptr += sequence.to(tl.int64) * st_b
    cache = (k_ptr + kv_head * sc_n, v_ptr + kv_head * sc_n, table_ptr, max_blocks)

    position = tl.minimum(offset + row, num_keys)
    last_position = offset + tl.minimum(block * ROWS + ROWS, q_len) - 1
    last = tl.cdiv(tl.minimum(tl.maximum(last_position, 0), num_keys), BN)
    unmasked = tl.minimum(tl.maximum(offset + block * ROWS, 0), num_keys) // BN
    # Rows beyond the sequence must not delay the exit.
    carry = tl.where(row_ok, 0.0, -1e30)
    acc, carry = sweep(
        carry, q, cache, position, num_keys, last, unmasked, 0, first_chunk, chunk, logit_scale, threshold,
        H, BH, ROWS, BN, BS, BLOCK, SLOT, BESIDE, False, NEARER, NEARER_PARTS, PARTS, PRECISION,
    )  # fmt: skip
    out = token * num_heads + head
    write(
        acc, carry, o_ptr, log_rest_ptr, out, row_ok, cache, offset + row, num_keys, dims,
        H, BS, BLOCK, SLOT, REMAINDER,
    )  # fmt: skip


@triton.jit(do_not_specialize=COUNTS)
def split_kernel(
    q_ptr, k_ptr, v_ptr, table_ptr, part_ptr, part_rest_ptr, o_ptr, log_rest_ptr, cu_q_ptr, seq_lens_ptr,
    num_tokens, num_kv_heads, num_sequences, max_blocks, split_queries, first_chunk, chunk,
    sq_t, sq_n, sc_n, st_b, logit_scale, threshold,
    H: tl.constexpr, BH: tl.constexpr, ROWS: tl.constexpr, BN: tl.constexpr, BS: tl.constexpr,
    BLOCK: tl.constexpr, SLOT: tl.constexpr,
    BESIDE: tl.constexpr, KV_GROUP: tl.constexpr, WHOLE: tl.constexpr, ONE_LOOP: tl.constexpr, EARLY: tl.constexpr,
    REMAINDER: tl.constexpr, NEARER: tl.constexpr, NEARER_PARTS: tl.constexpr, PARTS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """One split of the keys, split 0 being the nearest, for all queries and query heads of one key head.

    WHOLE: there is one split, which writes the results itself. EARLY: lets `merge_kernel` start, which then waits.
    """
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    split = tl.program_id(0)
    kv_head = tl.program_id(1)
    sequence = tl.program_id(2)
    q_start, q_len, num_keys, offset = lengths(cu_q_ptr, seq_lens_ptr, sequence, num_tokens, max_blocks, BS)
    tiles, per_split = shares(q_len, num_keys, offset, tl.num_programs(0), BN)
    last = tl.maximum(tiles - split * per_split, 0)
    first = tl.maximum(last - per_split, 0)
    # The merge does not read splits without tiles.
    if (q_len == 0) | (q_len > split_queries) | ((last == 0) & (tl.num_programs(0) > 1)):
        return
    local = tl.arange(0, ROWS)
    row = local // KV_GROUP
    head = kv_head * KV_GROUP + local % KV_GROUP
    dims = tl.arange(0, BH)
    row_ok = row < q_len
    in_rows = row_ok[:, None] & (dims < H)[None, :]
    token = (q_start + row).to(tl.int64)
    q = tl.load(q_ptr + (token * sq_t + head * sq_n)[:, None] + dims[None, :], mask=in_rows, other=0.0)
    table_ptr += sequence.to(tl.int64) * st_b
    cache = (k_ptr + kv_head * sc_n, v_ptr + kv_head * sc_n, table_ptr, max_blocks)

    position = tl.minimum(offset + row, num_keys)
    unmasked = tl.maximum(tl.minimum(tl.minimum(tl.maximum(offset, 0), num_keys) // BN, last), first)
    carry = tl.where(row_ok, 0.0, -1e30)
    acc, carry = sweep(
        carry, q, cache, position, num_keys, last, unmasked, first, first_chunk, chunk, logit_scale, threshold,
        H, BH, ROWS, BN, BS, BLOCK, SLOT, BESIDE, ONE_LOOP, NEARER, NEARER_PARTS, PARTS, PRECISION,
    )  # fmt: skip
    if WHOLE:
        out = token * (num_kv_heads * KV_GROUP) + head
        write(
            acc, carry, o_ptr, log_rest_ptr, out, row_ok, cache, offset + row, num_keys, dims,
            H, BS, BLOCK, SLOT, REMAINDER,
        )  # fmt: skip
    else:
        out = ((split * num_sequences + sequence).to(tl.int64) * num_kv_heads + kv_head) * ROWS + local
        tl.store(part_ptr + out[:, None] * H + dims[None, :], acc, mask=in_rows)
        tl.store(part_rest_ptr + out, carry, mask=row_ok)


@triton.jit(do_not_specialize=COUNTS)
def merge_kernel(
    part_ptr, part_rest_ptr, v_ptr, table_ptr, o_ptr, log_rest_ptr, cu_q_ptr, seq_lens_ptr,
    num_tokens, num_heads, num_sequences, num_splits, max_blocks, split_queries, sc_n, st_b,
    H: tl.constexpr, BH: tl.constexpr, ROWS: tl.constexpr, BN: tl.constexpr, BS: tl.constexpr,
    BLOCK: tl.constexpr, SLOT: tl.constexpr,
    KV_GROUP: tl.constexpr, REMAINDER: tl.constexpr, MERGED: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Adds the splits of one query and head from the nearest on, each scaled by what the nearer ones left.

    MERGED splits are loaded at once. EARLY: it may start before `split_kernel` has ended.
    """
    head = tl.program_id(0)
    query = tl.program_id(1)
    sequence = tl.program_id(2)
    q_start, q_len, num_keys, offset = lengths(cu_q_ptr, seq_lens_ptr, sequence, num_tokens, max_blocks, BS)
    tiles, per_split = shares(q_len, num_keys, offset, num_splits, BN)
    dims = tl.arange(0, BH)
    kv_head = head // KV_GROUP
    own = tl.zeros([1, BH], tl.float32)
    if REMAINDER:
        table_ptr += sequence.to(tl.int64) * st_b
        position = offset + query + tl.zeros([1], tl.int32)
        own = own_values(v_ptr + kv_head * sc_n, table_ptr, position, num_keys, dims, H, BS, BLOCK, SLOT)
    if EARLY:
        # Also where the program returns at once: the next kernel must not start before the splits have ended.
        tl.extra.cuda.gdc_wait()
    if (query >= q_len) | (q_len > split_queries):
        return
    rows = tl.full([], 1, tl.int64) * (num_heads // KV_GROUP) * ROWS  # of a sequence
    first_row = sequence * rows + kv_head * ROWS + query * KV_GROUP + head % KV_GROUP
    rest = tl.zeros([], tl.float32)
    acc = tl.zeros([BH], tl.float32)
    for start in range(0, num_splits, MERGED):
        split = start + tl.arange(0, MERGED)
        part_row = first_row + split * (num_sequences * rows)
        valid = split * per_split < tiles
        left = tl.load(part_rest_ptr + part_row, mask=valid, other=0.0)
        # What all nearer splits leave is summed without the split itself: subtracting it would cancel.
        nearer = (split > start) & valid
        before = tl.load(part_rest_ptr + part_row - num_sequences * rows, mask=nearer, other=0.0)
        # Loaded before it is known which splits a stick reaches, so that one load does not wait for another.
        part = tl.load(
            part_ptr + part_row[:, None] * H + dims[None, :], mask=valid[:, None] & (dims < H)[None, :], other=0.0
        )
        share = tl.exp2(rest + tl.cumsum(before, 0))
        acc += tl.sum(tl.where((share > 0)[:, None], share[:, None] * part, 0.0), 0)
        rest += tl.sum(left, 0)
    if REMAINDER:
        acc += tl.exp2(rest) * tl.sum(own, 0)
    out = (q_start + query).to(tl.int64) * num_heads + head
    tl.store(o_ptr + out * H + dims, acc.to(o_ptr.dtype.element_ty), mask=dims < H)
    tl.store(log_rest_ptr + out, rest * tile.LN_2)
