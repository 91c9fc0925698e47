# ruff: noqa: RUF005 (Triton compiles no starred tuples)
# mypy: disable-error-code=assignment
"""Walks over the key tiles of one row block, from the nearest to the farthest, until all of its sticks are spent.

A block starts with the fast algebra. If 16 adjacent keys of one of its rows turn out to spend more than `tile.RANGE`, it
starts again with the exact one. If sticks may be skipped, it is exact up to these keys and goes on with the fast one: a row
that spends so much has no stick left afterwards, so it is seldom that keys farther away spend as much. On the diagonal, this is
the rule for rows that attend to the nearest keys, so the diagonal and the tile after it are computed again at once.

`TILES` is the function that processes tiles, with the arguments of `walk_tiles`. q and source are what it takes. The state may
have more parts than that of `walk_tiles`, after these.
"""

import triton
import triton.language as tl

from . import blocks, half, tile

# Where a chunk of tiles leaves the range, so many of its tiles are taken to be the ones, and chunks are as short from then on.
SUSPECTS = tl.constexpr(4)
UNSPENT = tl.constexpr(1e30)  # what `fullest_stick` returns for blocks that need the exact algebra


@triton.jit
def take(t, w, after, spent, carry, worst, EXACT: tl.constexpr, HALF: tl.constexpr, WIDE: tl.constexpr):
    """Returns the weights of the keys of a tile, from what `tile.spend` returns, and the new carry and worst."""
    if not EXACT:
        worst = tl.maximum(worst, spent, propagate_nan=tl.PropagateNan.ALL)
    nearer, total = tile.lane_sums(spent, True)
    rest = carry.to(tl.float32) - nearer
    if HALF:
        rest += half.FORWARD_SHIFT
    a = tile.weigh(t, tile.factors(w, after, rest, None, EXACT, WIDE), EXACT)
    return a, carry - total, worst


@triton.jit
def walk_tiles(
    state, q, source, first, count, position, num_keys, logit_scale, floor,
    MASKED: tl.constexpr, EXACT: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, H: tl.constexpr, BH: tl.constexpr,
    HALF: tl.constexpr, PARTS: tl.constexpr, SKIPS: tl.constexpr,
):  # fmt: skip
    """Processes `count` tiles from tile `first` on, toward lower indices.

    state: acc [ROWS, BH]; carry, row_carry, row_tile and worst [ROWS, 4], where worst is the most that 16 adjacent keys
    have spent in the fast algebra.
    """
    acc, carry, row_carry, row_tile, worst = state
    column_key = tile.key_of_column(KEYS)
    dims = tl.arange(0, BH)
    # Hoisted parts of float32 would fill the registers, and so would the addresses of a single warp.
    WIDE: tl.constexpr = source[0].dtype.element_ty == tl.float32 or ROWS < 64
    for step in tl.range(count, num_stages=1 if MASKED else None, disable_licm=WIDE):
        t = first - step
        if ROWS < 64:
            column_key = blocks.each_round(column_key, step, H)
        alive = carry > floor
        row_carry = tl.where(alive, carry, row_carry)
        row_tile = tl.where(alive, t, row_tile)
        k, v = blocks.load_tiles(source, t, column_key, num_keys, dims, MASKED, KEYS, H, BH)
        products = blocks.products(q, k, source, t, column_key, num_keys, KEYS, H, BH)
        products, scale = tile.scale_live(products, alive, logit_scale, SKIPS)
        _, t_, w, after, spent = tile.spend(products, scale, position - t * KEYS, MASKED, EXACT, ROWS)
        a, carry, worst = take(t_, w, after, spent, carry, worst, EXACT, HALF, v.dtype == tl.float32)
        acc = tile.multiply(tile.put_together(a, ROWS), v, acc, False, PARTS)
    return acc, carry, row_carry, row_tile, worst


@triton.jit
def initial_state(entering, ROWS: tl.constexpr, BH: tl.constexpr):
    acc = tl.zeros([ROWS, BH], tl.float32)
    carry = tile.per_row(entering)
    return acc, carry, carry, tl.full([ROWS, 4], blocks.NEVER, tl.int32), tl.zeros([ROWS, 4], tl.float32)


@triton.jit
def fullest_stick(carry, worst, EXACT: tl.constexpr, RANGE: tl.constexpr):
    """Returns log2 of the largest rest of a row's stick, or UNSPENT if the rows need the exact algebra."""
    if not EXACT:
        carry = tl.where(worst < RANGE, carry, UNSPENT)
    return tl.max(tl.max(carry, 1), 0).to(tl.float32)


@triton.jit
def _larger(x, y, other_x, other_y):
    return tl.maximum(x, other_x), tl.maximum(y, other_y)


@triton.jit
def _after_diagonal(state, entering, RANGE: tl.constexpr):
    """Returns what `fullest_stick` does, and log2 of the most that a stick has lost, in one reduction."""
    carry, worst = state[1], state[4]
    # A carry that is NaN counts as beyond the range: `_larger` ignores NaN on a GPU, but not under the interpreter.
    left = tl.where((worst < RANGE) & (carry < UNSPENT), carry, UNSPENT).to(tl.float32)
    spent = (tile.per_row(entering) - carry).to(tl.float32)
    return tl.reduce(tl.reduce((left, spent), 1, _larger), 0, _larger)


@triton.jit
def _near_again(
    state, again, fresh, q, source, position, whole, seen, end, num_keys, logit_scale, floor,
    TILES: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, H: tl.constexpr, BH: tl.constexpr, HALF: tl.constexpr,
    PARTS: tl.constexpr,
):  # fmt: skip
    """Walks the diagonal and the tile after it with the exact algebra, if `again`.

    Returns the state, the next tile, and from which tile on the exact algebra was taken.
    """
    restarted = ()
    for i in tl.static_range(5):
        restarted = restarted + (tl.where(again, fresh[i], state[i]),)
    restarted = restarted + state[5:]
    exact_from = tl.where(again, tl.maximum(whole - 1, end), seen)
    state = TILES(
        restarted, q, source, seen - 1, seen - exact_from, position, num_keys, logit_scale, floor,
        True, True, ROWS, KEYS, H, BH, HALF, PARTS, True,
    )  # fmt: skip
    return state, tl.minimum(whole, exact_from) - 1, exact_from


@triton.jit
def _walk_on(
    state, t, ahead, fullest, exact_from, q, source, position, seen, end, num_keys, logit_scale, threshold, chunk,
    TILES: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, H: tl.constexpr, BH: tl.constexpr, HALF: tl.constexpr,
    PARTS: tl.constexpr, SKIPS: tl.constexpr,
):  # fmt: skip
    """Walks from tile t on with the fast algebra, `ahead` tiles at first. Returns what `walk_rows` does.

    The exit is tested once per chunk, because Triton does not pipeline a loop with a test in every iteration. The next
    chunk is as long as the fullest stick lasts at the rate of the last chunk.
    """
    RANGE: tl.constexpr = tile.RANGE_SKIPPING if SKIPS else tile.RANGE
    suspect = t
    while (t >= end) & (fullest >= threshold) & (fullest < UNSPENT):
        count = tl.minimum(t + 1 - end, ahead)
        suspect = t - tl.minimum(count, SUSPECTS)
        state = TILES(
            state, q, source, t, count, position, num_keys, logit_scale, tl.maximum(threshold, tile.DEAD),
            False, False, ROWS, KEYS, H, BH, HALF, PARTS, SKIPS,
        )  # fmt: skip
        t -= count
        left = fullest_stick(state[1], state[4], False, RANGE)
        lasts = (left - threshold) * count / tl.maximum(fullest - left, 1e-6)
        ahead = tl.minimum(lasts, chunk - 1.0).to(tl.int32) + 1
        fullest = left
    needed = end  # if nothing is skipped: spent rows would leave the range again and again
    if SKIPS:
        # At least twice as many tiles as before, so that a block does not start again at each of them.
        needed = tl.maximum(tl.minimum(suspect + 1, seen - 2 * (seen - exact_from)), end)
    return state, t + 1, exact_from, tl.where(fullest == UNSPENT, needed, exact_from)


@triton.jit
def walk_rows(
    fresh, entering, q, source, position, whole, seen, end, num_keys, logit_scale, threshold, first_chunk, chunk,
    TILES: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, H: tl.constexpr, BH: tl.constexpr, HALF: tl.constexpr,
    PARTS: tl.constexpr, SKIPS: tl.constexpr,
):  # fmt: skip
    """Walks the tiles seen − 1 to `end` of one row block, from the state `fresh` on. Returns the state, the last tile that was
    visited, from which tile on the exact algebra was taken, and from which on it has to be taken: a farther one if the fast one
    did not hold.
    """
    RANGE: tl.constexpr = tile.RANGE_SKIPPING if SKIPS else tile.RANGE
    floor = tl.maximum(threshold, tile.DEAD)
    exact_from = seen
    state = TILES(
        fresh, q, source, seen - 1, seen - whole, position, num_keys, logit_scale, floor,
        True, False, ROWS, KEYS, H, BH, HALF, PARTS, SKIPS,
    )  # fmt: skip
    t = whole - 1
    fullest, most_spent = _after_diagonal(state, entering, RANGE / 2 if SKIPS else RANGE)
    if SKIPS:
        again = fullest == UNSPENT
        state, t, exact_from = _near_again(
            state, again, fresh, q, source, position, whole, seen, end, num_keys, logit_scale, floor,
            TILES, ROWS, KEYS, H, BH, HALF, PARTS,
        )  # fmt: skip
        if again:
            fullest, most_spent = _after_diagonal(state, entering, RANGE)
    # At least as many tiles follow as would spend the stick that the diagonal has spent most of.
    lasts = (fullest - threshold) * (seen - whole) / tl.maximum(most_spent, 1e-6)
    ahead = tl.maximum(tl.minimum(lasts, chunk - 1.0).to(tl.int32) + 1, first_chunk)
    return _walk_on(
        state, t, ahead, fullest, exact_from, q, source, position, seen, end, num_keys, logit_scale, threshold, chunk,
        TILES, ROWS, KEYS, H, BH, HALF, PARTS, SKIPS,
    )  # fmt: skip


@triton.jit
def walk_again(
    fresh, entering, q, source, position, whole, seen, end, num_keys, logit_scale, threshold, first_chunk, chunk, exact_from,
    TILES: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, H: tl.constexpr, BH: tl.constexpr, HALF: tl.constexpr,
    PARTS: tl.constexpr, SKIPS: tl.constexpr,
):  # fmt: skip
    """`walk_rows` with the exact algebra for the tiles seen − 1 to `exact_from`."""
    state = TILES(
        fresh, q, source, seen - 1, seen - exact_from, position, num_keys, logit_scale,
        tl.maximum(threshold, tile.DEAD), True, True, ROWS, KEYS, H, BH, HALF, PARTS, SKIPS,
    )  # fmt: skip
    fullest, short = fullest_stick(state[1], state[4], True, 0.0), tl.minimum(chunk, SUSPECTS)
    return _walk_on(
        state, exact_from - 1, short, fullest, exact_from, q, source, position, seen, end, num_keys, logit_scale,
        threshold, short, TILES, ROWS, KEYS, H, BH, HALF, PARTS, SKIPS,
    )  # fmt: skip


@triton.jit
def scale_of_results(q_len, k_len, max_queries, max_keys, maxima_ptr, sequence, HALF: tl.constexpr):
    """Returns the number by which the sum of weighted values is multiplied."""
    # If a sequence exceeds the given maxima, backward's scratch is too small. The result shows this as NaN.
    scale = tl.where((k_len > max_keys) | (q_len > max_queries), float("nan"), 1.0)
    if HALF:
        scale *= tl.exp2(-half.conversion_exponent(maxima_ptr, sequence, half.V) - half.FORWARD_SHIFT)
    return scale


@triton.jit
def save_sticks(
    state, stop, exact_from, log_rest_ptr, row_carry_ptr, row_tile_ptr, block_stop_ptr, cu_q_ptr, sequence, head, block,
    token, row_ok, num_tokens, num_heads, q_len, num_stop_slots, threshold, ROWS: tl.constexpr,
):  # fmt: skip
    """Saves log_rest of a row block, and where its walk ended. token and row_ok [ROWS]: its tokens, and which exist."""
    tl.store(log_rest_ptr + token * num_heads + head, tl.max(state[1], 1) * tile.LN_2, mask=row_ok)
    # Backward starts from the carry where the weights of a row end, so that its subtractions stay accurate.
    saved = head.to(tl.int64) * num_tokens + token
    row_tile = tl.min(state[3], 1)
    tl.store(row_carry_ptr + saved, tl.max(state[2], 1), mask=row_ok)
    tl.store(row_tile_ptr + saved, row_tile, mask=row_ok)
    # Where nothing is skipped, the gradient of log_rest reaches every key.
    stop = tl.where(threshold < tile.DEAD, stop, tl.min(row_tile, 0))
    blocks.save_stop(block_stop_ptr, cu_q_ptr, sequence, head, block, q_len, num_stop_slots, stop, exact_from, ROWS)
