"""Prefill over a paged cache in bf16 and fp16, with 16 keys per thread. ../paged_launch.py launches it.

It visits tiles as forward.py does, and finds them as ../paged_kernels.py does. Weights of bf16 are multiplied in two
parts, because converting values to fp16 would read the whole cache for a few queries.
"""

import triton
import triton.language as tl

from .. import tile as common
from ..paged_kernels import COUNTS, lengths, multiply, write
from . import tile
from .forward import UNSPENT, fullest_stick


@triton.jit
def tile_blocks(table_ptr, t, max_blocks, BS: tl.constexpr):
    """Returns the blocks of tile t as a tuple: one number per block that the tile spans, or one tensor [64].

    For t = −1 and for blocks after the sequence's last one, these are some other numbers.
    """
    KEYS: tl.constexpr = tile.KEYS
    t = tl.maximum(t, 0)
    if BS // KEYS * KEYS == BS:
        blocks = (tl.load(table_ptr + tl.minimum(t * KEYS // BS, max_blocks - 1)),)
    elif KEYS % BS == 0 and BS % 16 == 0:
        blocks = (tl.load(table_ptr + tl.minimum(t * (KEYS // BS), max_blocks - 1)),)
        for i in tl.static_range(1, KEYS // BS):
            block = tl.load(table_ptr + tl.minimum(t * (KEYS // BS) + i, max_blocks - 1))
            # Triton does not unpack tuples.
            blocks = blocks + (block,)  # type: ignore[assignment]  # noqa: RUF005
    else:
        blocks = (tl.load(table_ptr + tl.minimum((t * KEYS + tile.key_of_column()) // BS, max_blocks - 1)),)
    return blocks


@triton.jit
def tile_rows(
    blocks,
    t,
    dims,
    BLOCK: tl.constexpr,
    BS: tl.constexpr,
    SLOT: tl.constexpr,
):
    """Returns where the keys of tile t are in the cache: three numbers or tensors to add to its pointer in this order.

    Row 8j + 2c + e of a tile is key 16c + 2j + e. The rows of a thread differ in j only, which comes last, so that it
    computes one address and reaches the others at constant distances.
    """
    KEYS: tl.constexpr = tile.KEYS
    row = tl.arange(0, KEYS)
    lane = row % 8 // 2
    if BS // KEYS * KEYS == BS:
        first = blocks[0].to(tl.int64) * BLOCK + t * KEYS % BS * SLOT
        then = ((lane * 16 + row % 2) * SLOT)[:, None] + dims[None, :]
        last = (row // 8 * (2 * SLOT))[:, None]
    elif KEYS % BS == 0 and BS % 16 == 0:
        block = tl.zeros([KEYS], blocks[0].dtype) + blocks[0]
        for i in tl.static_range(1, KEYS // BS):
            block = tl.where(lane // (BS // 16) == i, blocks[i], block)
        first = (block.to(tl.int64) * BLOCK)[:, None]
        then = ((lane % (BS // 16) * 16 + row % 2) * SLOT)[:, None] + dims[None, :]
        last = (row // 8 * (2 * SLOT))[:, None]
    else:
        first = (blocks[0].to(tl.int64) * BLOCK)[:, None]
        then = ((t * KEYS + tile.key_of_column()) % BS * SLOT)[:, None] + dims[None, :]
        last = 0
    return first, then, last


@triton.jit
def load(rows, in_keys, dims, MASKED: tl.constexpr, H: tl.constexpr, BH: tl.constexpr):
    if MASKED:
        x = tl.load(rows, mask=in_keys[:, None] & (dims < H)[None, :], other=0.0)
    elif H == BH:
        x = tl.load(rows)
    else:
        x = tl.load(rows, mask=(dims < H)[None, :], other=0.0)
    return x


@triton.jit
def walk_tiles(
    state,
    q,
    cache,
    newest,
    count,
    position,
    num_keys,
    logit_scale,
    MASKED: tl.constexpr,
    EXACT: tl.constexpr,
    ROWS: tl.constexpr,
    H: tl.constexpr,
    BH: tl.constexpr,
    BS: tl.constexpr,
    BLOCK: tl.constexpr,
    SLOT: tl.constexpr,
    BESIDE: tl.constexpr,
):
    """Processes `count` tiles from tile `newest` on, toward lower indices.

    state: acc [ROWS, BH]; carry and worst [ROWS, 4], where worst is the most that 16 adjacent keys have spent.
    """
    acc, carry, worst = state
    k_ptr, v_ptr, table_ptr, max_blocks = cache
    dims = tl.arange(0, BH)
    column_key = tile.key_of_column()
    blocks = tile_blocks(table_ptr, newest, max_blocks, BS)
    for step in tl.range(count, num_stages=1 if MASKED else None):
        t = newest - step
        first, then, last = tile_rows(blocks, t, dims, BLOCK, BS, SLOT)
        # Looked up one tile ahead, so that the loads of keys do not wait.
        blocks = tile_blocks(table_ptr, t - 1, max_blocks, BS)
        k_rows = k_ptr + first + then + last
        v_rows = k_rows + H if BESIDE else v_ptr + first + then + last
        in_keys = column_key < num_keys - t * tile.KEYS
        k = load(k_rows, in_keys, dims, MASKED, H, BH)  # [64, BH]
        v = load(v_rows, in_keys, dims, MASKED, H, BH)
        z = tl.dot(q, tl.trans(k)) * logit_scale  # [ROWS, 64]
        _, t_, w, after, spent = tile.spend(z, position - t * tile.KEYS, MASKED, EXACT, ROWS)
        worst = tl.maximum(worst, spent, propagate_nan=tl.PropagateNan.ALL)
        nearer, total = tile.lane_sums(spent, True)
        weights = tile.weigh(t_, tile.factors(w, after, carry - nearer, None, EXACT), EXACT)
        carry -= total
        acc = multiply(tile.put_together(weights, ROWS), v, acc, 2, "tf32")
    return acc, carry, worst


@triton.jit
def walk_rows(
    entering,
    q,
    cache,
    position,
    whole,
    seen,
    num_keys,
    logit_scale,
    threshold,
    first_chunk,
    chunk,
    EXACT: tl.constexpr,
    ROWS: tl.constexpr,
    H: tl.constexpr,
    BH: tl.constexpr,
    BS: tl.constexpr,
    BLOCK: tl.constexpr,
    SLOT: tl.constexpr,
    BESIDE: tl.constexpr,
):
    """Walks the tiles of one row block, as forward.walk_rows does. Returns acc, the carry [ROWS], and whether the fast
    algebra did not hold."""
    carry = tile.per_row(entering)
    state = (tl.zeros([ROWS, BH], tl.float32), carry, tl.zeros([ROWS, 4], tl.float32))
    t = seen - 1
    ahead = first_chunk
    fullest = tl.max(entering, 0)
    if not EXACT:
        state = walk_tiles(
            state, q, cache, t, seen - whole, position, num_keys, logit_scale,
            True, False, ROWS, H, BH, BS, BLOCK, SLOT, BESIDE,
        )  # fmt: skip
        t = whole - 1
        fullest = fullest_stick(state[1], state[2], False)
    while (t >= 0) & (fullest >= threshold) & (fullest < UNSPENT):
        count = tl.minimum(t + 1, ahead)
        state = walk_tiles(
            state, q, cache, t, count, position, num_keys, logit_scale,
            EXACT, EXACT, ROWS, H, BH, BS, BLOCK, SLOT, BESIDE,
        )  # fmt: skip
        t -= count
        left = fullest_stick(state[1], state[2], EXACT)
        lasts = (left - threshold) * count / tl.maximum(fullest - left, 1e-6)
        ahead = tl.minimum(lasts, chunk - 1.0).to(tl.int32) + 1
        fullest = left
    return state[0], tl.max(state[1], 1), fullest == UNSPENT


@triton.jit(do_not_specialize=COUNTS)
def prefill_kernel(
    q_ptr, k_ptr, v_ptr, table_ptr, o_ptr, log_rest_ptr, cu_q_ptr, seq_lens_ptr,
    num_tokens, num_heads, num_sequences, num_slots, max_blocks, head_group, split_queries, first_chunk, chunk,
    sq_t, sq_n, sc_n, st_b, logit_scale, threshold,
    H: tl.constexpr, BH: tl.constexpr, ROWS: tl.constexpr, BS: tl.constexpr, BLOCK: tl.constexpr, SLOT: tl.constexpr,
    BESIDE: tl.constexpr, KV_GROUP: tl.constexpr, REMAINDER: tl.constexpr,
):  # fmt: skip
    """ROWS queries of one head. Leaves sequences of up to `split_queries` queries to `paged_kernels.split_kernel`."""
    places = tl.cdiv(num_slots, num_sequences) * num_sequences
    head, place = common.assign(tl.program_id(0), num_heads, head_group, places)
    slot = common.slot_at(place, num_slots, num_sequences, True)
    if slot >= num_slots:
        return
    sequence, block = common.locate(cu_q_ptr, slot, num_sequences, ROWS)
    q_start, q_len, num_keys, offset = lengths(cu_q_ptr, seq_lens_ptr, sequence, num_tokens, max_blocks, BS)
    if (block < 0) | (block * ROWS >= q_len) | (q_len <= split_queries):
        return
    row = block * ROWS + tl.arange(0, ROWS)
    dims = tl.arange(0, BH)
    row_ok = row < q_len
    token = (q_start + row).to(tl.int64)
    in_rows = row_ok[:, None] & (dims < H)[None, :]
    q = tl.load(q_ptr + token[:, None] * sq_t + head * sq_n + dims[None, :], mask=in_rows, other=0.0)
    kv_head = head // KV_GROUP
    table_ptr += sequence.to(tl.int64) * st_b
    cache = (k_ptr + kv_head * sc_n, v_ptr + kv_head * sc_n, table_ptr, max_blocks)
    last_position = offset + tl.minimum(block * ROWS + ROWS, q_len) - 1
    seen = tl.cdiv(tl.minimum(tl.maximum(last_position, 0), num_keys), tile.KEYS)
    whole = tl.minimum(tl.maximum(offset + block * ROWS, 0), num_keys) // tile.KEYS
    # Rows after the sequence's end must not delay the exit.
    entering = tl.where(row_ok, 0.0, -1e30)
    walk = (
        entering, q, cache, tl.minimum(offset + row, num_keys), whole, seen, num_keys, logit_scale, threshold,
        first_chunk, chunk,
    )  # fmt: skip
    results = (o_ptr, log_rest_ptr, token * num_heads + head, row_ok, cache, offset + row, num_keys, dims)
    acc, carry, exact = walk_rows(*walk, False, ROWS, H, BH, BS, BLOCK, SLOT, BESIDE)
    write(acc, carry, *results, H, BS, BLOCK, SLOT, REMAINDER)
    if exact:
        acc, carry, _ = walk_rows(*walk, True, ROWS, H, BH, BS, BLOCK, SLOT, BESIDE)
        write(acc, carry, *results, H, BS, BLOCK, SLOT, REMAINDER)
