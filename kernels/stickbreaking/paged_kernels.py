"""The Triton kernels over a paged key/value cache: prefill, decode split over the keys, and the merge of the splits."""

import triton
import triton.language as tl

from . import blocks, tile
from .paged_walk import walk_rows

# Counts vary between batches. Triton must not compile again when one of them is 1 or a multiple of 16.
COUNTS = (
    "num_tokens", "num_heads", "num_kv_heads", "num_sequences", "num_slots", "num_splits", "max_blocks",
    "heads_beside", "slots_each",
    "split_queries", "first_chunk", "chunk", "st_b",
)  # fmt: skip


@triton.jit
def lengths(cu_q_ptr, seq_lens_ptr, sequence, num_tokens, max_blocks, BS: tl.constexpr):
    """Returns a sequence's first token, its number of new tokens, its number of keys and its first new position."""
    q_start, q_len = blocks.bounds(cu_q_ptr, sequence, num_tokens)
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
    WHOLE: tl.constexpr,
):  # fmt: skip
    """Writes the results of the rows at `position` to row `out` of o and log_rest. WHOLE: not those of a split only."""
    if REMAINDER:
        own = own_values(cache[1], cache[2], position, num_keys, dims, H, BS, BLOCK, SLOT)
        acc += tl.exp2(carry)[:, None] * own
    in_rows = row_ok[:, None] & (dims < H)[None, :]
    tl.store(o_ptr + out[:, None] * H + dims[None, :], acc.to(o_ptr.dtype.element_ty), mask=in_rows)
    tl.store(log_rest_ptr + out, carry * (tile.LN_2 if WHOLE else 1.0), mask=row_ok)


@triton.jit
def shares(q_len, num_keys, offset, num_splits, KEYS: tl.constexpr):
    """Returns the number of tiles that any new token attends to, and how many of them are one split's."""
    tiles = tl.cdiv(tl.minimum(tl.maximum(offset + q_len - 1, 0), num_keys), KEYS)
    return tiles, tl.cdiv(tiles, num_splits)


@triton.jit(do_not_specialize=COUNTS)
def prefill_kernel(
    q_ptr, k_ptr, v_ptr, table_ptr, o_ptr, log_rest_ptr, cu_q_ptr, seq_lens_ptr,
    num_tokens, num_heads, num_sequences, num_slots, max_blocks, heads_beside, slots_each, split_queries, first_chunk, chunk,
    sq_t, sq_n, sc_n, st_b, logit_scale, threshold,
    H: tl.constexpr, BH: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, BS: tl.constexpr,
    BLOCK: tl.constexpr, SLOT: tl.constexpr,
    BESIDE: tl.constexpr, KV_GROUP: tl.constexpr, REMAINDER: tl.constexpr,
):  # fmt: skip
    """ROWS queries of one head. Leaves sequences of up to `split_queries` queries to split_kernel."""
    head, slot = blocks.assign(heads_beside, num_sequences, slots_each, True)
    if (head >= num_heads) | (slot >= num_slots):
        return
    sequence, block = blocks.locate(cu_q_ptr, slot, num_sequences, ROWS)
    q_start, q_len, num_keys, offset = lengths(cu_q_ptr, seq_lens_ptr, sequence, num_tokens, max_blocks, BS)
    if (block < 0) | (block * ROWS >= q_len) | (q_len <= split_queries):
        return
    row = block * ROWS + tl.arange(0, ROWS)
    dims = tl.arange(0, BH)
    row_ok = row < q_len
    token = (q_start + row).to(tl.int64)
    q = blocks.load_rows(q_ptr, token, sq_t, head, sq_n, row_ok, dims, H)
    kv_head = head // KV_GROUP
    table_ptr += sequence.to(tl.int64) * st_b
    cache = (k_ptr + kv_head * sc_n, v_ptr + kv_head * sc_n, table_ptr, max_blocks)

    last_position = offset + tl.minimum(block * ROWS + ROWS, q_len) - 1
    seen = tl.cdiv(tl.minimum(tl.maximum(last_position, 0), num_keys), KEYS)
    whole = tl.minimum(tl.maximum(offset + block * ROWS, 0), num_keys) // KEYS
    # Rows after the sequence's end must not delay the exit.
    entering = tl.where(row_ok, 0.0, -1e30)
    walk = (
        entering, q, cache, tl.minimum(offset + row, num_keys), whole, seen, 0, num_keys, logit_scale, threshold,
        first_chunk, chunk,
    )  # fmt: skip
    results = (o_ptr, log_rest_ptr, token * num_heads + head, row_ok, cache, offset + row, num_keys, dims)
    acc, carry, exact = walk_rows(*walk, False, ROWS, KEYS, H, BH, BS, BLOCK, SLOT, BESIDE)
    write(acc, carry, *results, H, BS, BLOCK, SLOT, REMAINDER, True)
    if exact:
        acc, carry, _ = walk_rows(*walk, True, ROWS, KEYS, H, BH, BS, BLOCK, SLOT, BESIDE)
        write(acc, carry, *results, H, BS, BLOCK, SLOT, REMAINDER, True)


@triton.jit(do_not_specialize=COUNTS)
def split_kernel(
    q_ptr, k_ptr, v_ptr, table_ptr, part_ptr, part_rest_ptr, o_ptr, log_rest_ptr, cu_q_ptr, seq_lens_ptr,
    num_tokens, num_kv_heads, num_sequences, max_blocks, split_queries, first_chunk, chunk,
    sq_t, sq_n, sc_n, st_b, logit_scale, threshold,
    H: tl.constexpr, BH: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, BS: tl.constexpr,
    BLOCK: tl.constexpr, SLOT: tl.constexpr,
    BESIDE: tl.constexpr, KV_GROUP: tl.constexpr, WHOLE: tl.constexpr, EARLY: tl.constexpr, REMAINDER: tl.constexpr,
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
    tiles, per_split = shares(q_len, num_keys, offset, tl.num_programs(0), KEYS)
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
    token = (q_start + row).to(tl.int64)
    q = blocks.load_rows(q_ptr, token, sq_t, head[:, None], sq_n, row_ok, dims, H)
    table_ptr += sequence.to(tl.int64) * st_b
    cache = (k_ptr + kv_head * sc_n, v_ptr + kv_head * sc_n, table_ptr, max_blocks)

    whole = tl.maximum(tl.minimum(tl.minimum(tl.maximum(offset, 0), num_keys) // KEYS, last), first)
    walk = (
        tl.where(row_ok, 0.0, -1e30), q, cache, tl.minimum(offset + row, num_keys), whole, last, first, num_keys,
        logit_scale, threshold, first_chunk, chunk,
    )  # fmt: skip
    if WHOLE:
        out = token * (num_kv_heads * KV_GROUP) + head
        results = (o_ptr, log_rest_ptr, out, row_ok, cache, offset + row, num_keys, dims)
    else:
        out = ((split * num_sequences + sequence).to(tl.int64) * num_kv_heads + kv_head) * ROWS + local
        results = (part_ptr, part_rest_ptr, out, row_ok, cache, offset + row, num_keys, dims)
    acc, carry, exact = walk_rows(*walk, False, ROWS, KEYS, H, BH, BS, BLOCK, SLOT, BESIDE)
    write(acc, carry, *results, H, BS, BLOCK, SLOT, REMAINDER, WHOLE)
    if exact:
        acc, carry, _ = walk_rows(*walk, True, ROWS, KEYS, H, BH, BS, BLOCK, SLOT, BESIDE)
        write(acc, carry, *results, H, BS, BLOCK, SLOT, REMAINDER, WHOLE)


@triton.jit(do_not_specialize=COUNTS)
def merge_kernel(
    part_ptr, part_rest_ptr, v_ptr, table_ptr, o_ptr, log_rest_ptr, cu_q_ptr, seq_lens_ptr,
    num_tokens, num_heads, num_sequences, num_splits, max_blocks, split_queries, sc_n, st_b,
    H: tl.constexpr, BH: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, BS: tl.constexpr,
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
    tiles, per_split = shares(q_len, num_keys, offset, num_splits, KEYS)
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
