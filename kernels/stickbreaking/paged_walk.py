"""Walks over the tiles of a paged cache, for the kernels of paged_kernels.py.

Key j of a sequence is in slot j % BS of block table[j // BS], where BS is the block size. Tiles are visited as in
forward.py. Weights of bf16 are multiplied in two parts, because converting values to fp16 would read the whole cache for
a few queries.
"""

import triton
import triton.language as tl

from . import tile
from .forward import UNSPENT, fullest_stick


@triton.jit
def tile_blocks(table_ptr, t, max_blocks, KEYS: tl.constexpr, BS: tl.constexpr):
    """Returns the blocks of tile t as a tuple: one number per block that the tile spans, or one tensor [KEYS].

    For t = −1 and for blocks after the sequence's last one, these are some other numbers.
    """
    t = tl.maximum(t, 0)
    if BS // KEYS * KEYS == BS:
        blocks = (tl.load(table_ptr + tl.minimum(t * KEYS // BS, max_blocks - 1)),)
    elif KEYS % BS == 0 and BS % (KEYS // 4) == 0:
        blocks = (tl.load(table_ptr + tl.minimum(t * (KEYS // BS), max_blocks - 1)),)
        for i in tl.static_range(1, KEYS // BS):
            block = tl.load(table_ptr + tl.minimum(t * (KEYS // BS) + i, max_blocks - 1))
            # Triton does not unpack tuples.
            blocks = blocks + (block,)  # type: ignore[assignment]  # noqa: RUF005
    else:
        blocks = (tl.load(table_ptr + tl.minimum((t * KEYS + tile.key_of_column(KEYS)) // BS, max_blocks - 1)),)
    return blocks


@triton.jit
def tile_rows(
    blocks,
    t,
    dims,
    KEYS: tl.constexpr,
    BLOCK: tl.constexpr,
    BS: tl.constexpr,
    SLOT: tl.constexpr,
):
    """Returns where the keys of tile t are in the cache: three numbers or tensors to add to its pointer in this order.

    Row 8j + 2c + e of a tile is key (KEYS / 4) c + 2j + e. The rows of a thread differ in j only, which comes last, so that it
    computes one address and reaches the others at constant distances.
    """
    row = tl.arange(0, KEYS)
    lane = row % 8 // 2
    if BS // KEYS * KEYS == BS:
        first = blocks[0].to(tl.int64) * BLOCK + t * KEYS % BS * SLOT
        then = ((lane * (KEYS // 4) + row % 2) * SLOT)[:, None] + dims[None, :]
        last = (row // 8 * (2 * SLOT))[:, None]
    elif KEYS % BS == 0 and BS % (KEYS // 4) == 0:
        block = tl.zeros([KEYS], blocks[0].dtype) + blocks[0]
        for i in tl.static_range(1, KEYS // BS):
            block = tl.where(lane // (BS // (KEYS // 4)) == i, blocks[i], block)
        first = (block.to(tl.int64) * BLOCK)[:, None]
        then = ((lane % (BS // (KEYS // 4)) * (KEYS // 4) + row % 2) * SLOT)[:, None] + dims[None, :]
        last = (row // 8 * (2 * SLOT))[:, None]
    else:
        first = (blocks[0].to(tl.int64) * BLOCK)[:, None]
        then = ((t * KEYS + tile.key_of_column(KEYS)) % BS * SLOT)[:, None] + dims[None, :]
        last = 0
    return first, then, last


@triton.jit
def multiply(x, y, acc):
    """Returns acc + x y. x, float32, is multiplied in two parts of y's dtype if that has 16 bits."""
    if y.dtype == tl.bfloat16:
        # Truncating the bits is exact, and converting back would run at an eighth of the rate.
        high = (x.to(tl.int32, bitcast=True) & -65536).to(tl.float32, bitcast=True)
        acc = tl.dot(high.to(y.dtype), y, acc)
        acc = tl.dot((x - high).to(y.dtype), y, acc)
    else:
        acc = tile.multiply(x, y, acc, False, 1 if y.dtype == tl.float32 else 2)
    return acc


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
    KEYS: tl.constexpr,
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
    column_key = tile.key_of_column(KEYS)
    blocks = tile_blocks(table_ptr, newest, max_blocks, KEYS, BS)
    # Hoisted parts of float32 would fill the registers.
    WIDE: tl.constexpr = k_ptr.dtype.element_ty == tl.float32
    for step in tl.range(count, num_stages=1 if MASKED else None, disable_licm=WIDE):
        t = newest - step
        first, then, last = tile_rows(blocks, t, dims, KEYS, BLOCK, BS, SLOT)
        _, own_rows, _ = tile_rows(blocks, t, tl.zeros([1], tl.int32), KEYS, BLOCK, BS, SLOT)
        # Looked up one tile ahead, so that the loads of keys do not wait.
        blocks = tile_blocks(table_ptr, t - 1, max_blocks, KEYS, BS)
        k_rows = k_ptr + first + then + last
        v_rows = k_rows + H if BESIDE else v_ptr + first + then + last
        in_keys = column_key < num_keys - t * KEYS
        k = load(k_rows, in_keys, dims, MASKED, H, BH)  # [64, BH]
        v = load(v_rows, in_keys, dims, MASKED, H, BH)
        if WIDE:
            z = tile.sliced_products(q, (k_ptr + first + own_rows + last, in_keys), H, BH) * logit_scale
        else:
            z = tl.dot(q, tl.trans(k)) * logit_scale  # [ROWS, KEYS]
        _, t_, w, after, spent = tile.spend(z, 1.0, position - t * KEYS, MASKED, EXACT, ROWS)
        worst = tl.maximum(worst, spent, propagate_nan=tl.PropagateNan.ALL)
        nearer, total = tile.lane_sums(spent, True)
        weights = tile.weigh(t_, tile.factors(w, after, carry - nearer, None, EXACT, WIDE), EXACT)
        carry -= total
        acc = multiply(tile.put_together(weights, ROWS), v, acc)
    return acc, carry, worst


@triton.jit
def walk_rows(
    entering,
    q,
    cache,
    position,
    whole,
    seen,
    end,
    num_keys,
    logit_scale,
    threshold,
    first_chunk,
    chunk,
    EXACT: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    H: tl.constexpr,
    BH: tl.constexpr,
    BS: tl.constexpr,
    BLOCK: tl.constexpr,
    SLOT: tl.constexpr,
    BESIDE: tl.constexpr,
):
    """Walks the tiles seen − 1 to `end` of one row block, as forward.walk_rows does. Returns acc, the carry [ROWS], and
    whether the fast algebra did not hold."""
    carry = tile.per_row(entering)
    state = (tl.zeros([ROWS, BH], tl.float32), carry, tl.zeros([ROWS, 4], tl.float32))
    t = seen - 1
    ahead = first_chunk
    fullest = tl.max(entering, 0)
    if not EXACT:
        state = walk_tiles(
            state, q, cache, t, seen - whole, position, num_keys, logit_scale,
            True, False, ROWS, KEYS, H, BH, BS, BLOCK, SLOT, BESIDE,
        )  # fmt: skip
        t = whole - 1
        fullest = fullest_stick(state[1], state[2], False, tile.RANGE)
    while (t >= end) & (fullest >= threshold) & (fullest < UNSPENT):
        count = tl.minimum(t + 1 - end, ahead)
        state = walk_tiles(
            state, q, cache, t, count, position, num_keys, logit_scale,
            EXACT, EXACT, ROWS, KEYS, H, BH, BS, BLOCK, SLOT, BESIDE,
        )  # fmt: skip
        t -= count
        left = fullest_stick(state[1], state[2], EXACT, tile.RANGE)
        lasts = (left - threshold) * count / tl.maximum(fullest - left, 1e-6)
        ahead = tl.minimum(lasts, chunk - 1.0).to(tl.int32) + 1
        fullest = left
    return state[0], tl.max(state[1], 1), fullest == UNSPENT
