"""The forward kernel: visits key tiles from the nearest to the farthest, until every stick of a block is spent.

A block starts with the fast algebra. If 16 adjacent keys of one of its rows turn out to spend more than `tile.RANGE`, it
starts again with the exact one. If sticks may be skipped, it is exact up to these keys and goes on with the fast one: a row
that spends so much has no stick left afterwards, so it is seldom that keys farther away spend as much. On the diagonal, this is
the rule for rows that attend to the nearest keys, so the diagonal and the tile after it are computed again at once.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import blocks, half, tile
from .descriptors import descriptors
from .kept import aux_shapes, carry_dtype
from .launching import begin, launch_kernel
from .settings import COUNTS, GROUP_BYTES, Config, grid, head_group, last_contiguous, launch, log2_threshold

LOG2_E = 1.4426950408889634
# Where a chunk of tiles leaves the range, so many of its tiles are taken to be the ones, and chunks are as short from then on.
SUSPECTS = tl.constexpr(4)
UNSPENT = tl.constexpr(1e30)  # what `fullest_stick` returns for blocks that need the exact algebra


def forward_config(head_dim: int, dtype: torch.dtype = torch.bfloat16) -> Config:
    """Returns launch settings. docs/log/2026-11-24-sixteen-keys.md has the measured ones and what is predicted."""
    if dtype == torch.float32:
        # Both parts of the operands of wider tiles would not fit the registers.
        return Config(64, 64 if head_dim <= 32 else 32, 4, 1)
    if head_dim <= 64:
        return Config(64, 64, 4, 3, 128 if head_dim <= 32 else 168)
    return Config(128, 64, 8, 3)


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
        if not EXACT:
            worst = tl.maximum(worst, spent, propagate_nan=tl.PropagateNan.ALL)
        nearer, total = tile.lane_sums(spent, True)
        rest = carry.to(tl.float32) - nearer
        if HALF:
            rest += half.FORWARD_SHIFT
        a = tile.weigh(t_, tile.factors(w, after, rest, None, EXACT, v.dtype == tl.float32), EXACT)
        carry -= total
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
    state, again, entering, q, source, position, whole, seen, end, num_keys, logit_scale, floor,
    ROWS: tl.constexpr, KEYS: tl.constexpr, H: tl.constexpr, BH: tl.constexpr, HALF: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Walks the diagonal and the tile after it with the exact algebra, if `again`.

    Returns the state, the next tile, and from which tile on the exact algebra was taken.
    """
    acc, carry, row_carry, row_tile, worst = initial_state(entering, ROWS, BH)
    restarted = (
        tl.where(again, acc, state[0]),
        tl.where(again, carry, state[1]),
        tl.where(again, row_carry, state[2]),
        tl.where(again, row_tile, state[3]),
        tl.where(again, worst, state[4]),
    )
    exact_from = tl.where(again, tl.maximum(whole - 1, end), seen)
    state = walk_tiles(
        restarted, q, source, seen - 1, seen - exact_from, position, num_keys, logit_scale, floor,
        True, True, ROWS, KEYS, H, BH, HALF, PARTS, True,
    )  # fmt: skip
    return state, tl.minimum(whole, exact_from) - 1, exact_from


@triton.jit
def _walk_on(
    state, t, ahead, fullest, exact_from, q, source, position, seen, end, num_keys, logit_scale, threshold, chunk,
    ROWS: tl.constexpr, KEYS: tl.constexpr, H: tl.constexpr, BH: tl.constexpr, HALF: tl.constexpr, PARTS: tl.constexpr,
    SKIPS: tl.constexpr,
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
        state = walk_tiles(
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
    entering, q, source, position, whole, seen, end, num_keys, logit_scale, threshold, first_chunk,
    chunk, ROWS: tl.constexpr, KEYS: tl.constexpr, H: tl.constexpr, BH: tl.constexpr,
    HALF: tl.constexpr, PARTS: tl.constexpr, SKIPS: tl.constexpr,
):  # fmt: skip
    """Walks the tiles seen − 1 to `end` of one row block. Returns the state of `walk_tiles`, the last tile that was visited,
    from which tile on the exact algebra was taken, and from which on it has to be taken: a farther one if the fast one did not
    hold.
    """
    RANGE: tl.constexpr = tile.RANGE_SKIPPING if SKIPS else tile.RANGE
    floor = tl.maximum(threshold, tile.DEAD)
    exact_from = seen
    state = walk_tiles(
        initial_state(entering, ROWS, BH), q, source, seen - 1, seen - whole, position, num_keys, logit_scale, floor,
        True, False, ROWS, KEYS, H, BH, HALF, PARTS, SKIPS,
    )  # fmt: skip
    t = whole - 1
    fullest, most_spent = _after_diagonal(state, entering, RANGE / 2 if SKIPS else RANGE)
    if SKIPS:
        again = fullest == UNSPENT
        state, t, exact_from = _near_again(
            state, again, entering, q, source, position, whole, seen, end, num_keys, logit_scale, floor,
            ROWS, KEYS, H, BH, HALF, PARTS,
        )  # fmt: skip
        if again:
            fullest, most_spent = _after_diagonal(state, entering, RANGE)
    # At least as many tiles follow as would spend the stick that the diagonal has spent most of.
    lasts = (fullest - threshold) * (seen - whole) / tl.maximum(most_spent, 1e-6)
    ahead = tl.maximum(tl.minimum(lasts, chunk - 1.0).to(tl.int32) + 1, first_chunk)
    return _walk_on(
        state, t, ahead, fullest, exact_from, q, source, position, seen, end, num_keys, logit_scale, threshold, chunk,
        ROWS, KEYS, H, BH, HALF, PARTS, SKIPS,
    )  # fmt: skip


@triton.jit
def walk_again(
    entering, q, source, position, whole, seen, end, num_keys, logit_scale, threshold, first_chunk,
    chunk, exact_from, ROWS: tl.constexpr, KEYS: tl.constexpr, H: tl.constexpr, BH: tl.constexpr,
    HALF: tl.constexpr, PARTS: tl.constexpr, SKIPS: tl.constexpr,
):  # fmt: skip
    """`walk_rows` with the exact algebra for the tiles seen − 1 to `exact_from`."""
    state = walk_tiles(
        initial_state(entering, ROWS, BH), q, source, seen - 1, seen - exact_from, position, num_keys, logit_scale,
        tl.maximum(threshold, tile.DEAD), True, True, ROWS, KEYS, H, BH, HALF, PARTS, SKIPS,
    )  # fmt: skip
    fullest, short = fullest_stick(state[1], state[4], True, 0.0), tl.minimum(chunk, SUSPECTS)
    return _walk_on(
        state, exact_from - 1, short, fullest, exact_from, q, source, position, seen, end, num_keys, logit_scale,
        threshold, short, ROWS, KEYS, H, BH, HALF, PARTS, SKIPS,
    )  # fmt: skip


@triton.jit
def save_rows(
    state, stop, exact_from, o_ptr, log_rest_ptr, row_carry_ptr, row_tile_ptr, block_stop_ptr, cu_q_ptr, sequence, head, block,
    token, row_ok, num_tokens, num_heads, q_len, num_stop_slots, threshold, scale,
    ROWS: tl.constexpr, H: tl.constexpr, BH: tl.constexpr,
):  # fmt: skip
    acc, carry, row_carry, row_tile, _ = state
    dims = tl.arange(0, BH)
    rows = token * num_heads + head
    o = o_ptr + rows[:, None] * H + dims[None, :]
    tl.store(o, (acc * scale).to(o_ptr.dtype.element_ty), mask=row_ok[:, None] & (dims < H)[None, :])
    tl.store(log_rest_ptr + rows, tl.max(carry, 1) * tile.LN_2, mask=row_ok)
    # Backward starts from the carry where the weights of a row end, so that its subtractions stay accurate.
    saved = head.to(tl.int64) * num_tokens + token
    row_tile = tl.min(row_tile, 1)
    tl.store(row_carry_ptr + saved, tl.max(row_carry, 1), mask=row_ok)
    tl.store(row_tile_ptr + saved, row_tile, mask=row_ok)
    # Where nothing is skipped, the gradient of log_rest reaches every key.
    stop = tl.where(threshold < tile.DEAD, stop, tl.min(row_tile, 0))
    blocks.save_stop(block_stop_ptr, cu_q_ptr, sequence, head, block, q_len, num_stop_slots, stop, exact_from, ROWS)


@triton.jit
def _run(
    needed, sequence, block, head,
    q_ptr, k_ptr, v_ptr, k_descriptor, v_descriptor, o_ptr, log_rest_in_ptr, log_rest_ptr, row_carry_ptr, row_tile_ptr,
    block_stop_ptr, cu_q_ptr, cu_k_ptr, offset_ptr, maxima_ptr, num_tokens, num_keys_total, num_heads, num_stop_slots,
    max_queries, max_keys, sq_t, sq_n, sk_t, sk_n, sv_t, sv_n, first_chunk, chunk, logit_scale, threshold,
    AGAIN: tl.constexpr, H: tl.constexpr, BH: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, KV_GROUP: tl.constexpr,
    HAS_OFFSET: tl.constexpr, HAS_REST: tl.constexpr, HALF: tl.constexpr, PARTS: tl.constexpr, SKIPS: tl.constexpr,
):  # fmt: skip
    """Walks and saves a row block, AGAIN with the exact algebra as far as `needed`.

    Returns from which tile on the exact algebra was taken, and from which on it has to be taken.
    """
    q_start, q_len, k_start, k_len, offset = blocks.lengths(
        cu_q_ptr, cu_k_ptr, offset_ptr, sequence, num_tokens, num_keys_total, HAS_OFFSET
    )
    position, whole, seen = blocks.visible(block, q_len, k_len, offset, ROWS, KEYS)
    row = block * ROWS + tl.arange(0, ROWS)
    row_ok = row < q_len
    token = (q_start + row).to(tl.int64)
    q = blocks.load_rows(q_ptr, token, sq_t, head, sq_n, row_ok, tl.arange(0, BH), H)
    if HALF and not AGAIN:
        half.enter(maxima_ptr, sequence, half.Q, q)
    entering = tl.zeros([ROWS], tl.float32)
    if HAS_REST:
        entering = tl.load(log_rest_in_ptr + token * num_heads + head, mask=row_ok, other=0.0).to(tl.float32)
    # Rows after the sequence's end must not delay the exit.
    entering = tl.where(row_ok, entering * tile.LOG2_E, -1e30).to(row_carry_ptr.dtype.element_ty)
    source = (k_ptr, v_ptr, k_descriptor, v_descriptor, sk_t, sk_n, sv_t, sv_n, k_start, head // KV_GROUP)
    # If a sequence exceeds the given maxima, backward's scratch is too small. The result shows this as NaN.
    scale = tl.where((k_len > max_keys) | (q_len > max_queries), float("nan"), 1.0)
    if HALF:
        scale *= tl.exp2(-half.conversion_exponent(maxima_ptr, sequence, half.V) - half.FORWARD_SHIFT)
    walk = (
        entering, q, source, position, whole, seen, 0, k_len, logit_scale, threshold, first_chunk, chunk,
    )  # fmt: skip
    if AGAIN:
        state, stop, exact_from, needed = walk_again(*walk, needed, ROWS, KEYS, H, BH, HALF, PARTS, SKIPS)
    else:
        state, stop, exact_from, needed = walk_rows(*walk, ROWS, KEYS, H, BH, HALF, PARTS, SKIPS)
    save_rows(
        state, stop, exact_from, o_ptr, log_rest_ptr, row_carry_ptr, row_tile_ptr, block_stop_ptr, cu_q_ptr, sequence, head,
        block, token, row_ok, num_tokens, num_heads, q_len, num_stop_slots, threshold, scale, ROWS, H, BH,
    )  # fmt: skip
    return exact_from, needed


@triton.jit(do_not_specialize=COUNTS)
def forward_kernel(
    q_ptr, k_ptr, v_ptr, k_descriptor, v_descriptor, o_ptr, log_rest_in_ptr, log_rest_ptr, row_carry_ptr, row_tile_ptr,
    block_stop_ptr, cu_q_ptr, cu_k_ptr, offset_ptr, maxima_ptr,
    num_tokens, num_keys_total, num_heads, heads_beside, slots_each, num_sequences, num_slots, num_stop_slots, max_queries,
    max_keys, sq_t, sq_n, sk_t, sk_n, sv_t, sv_n, first_chunk, chunk, logit_scale, threshold,
    H: tl.constexpr, BH: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, KV_GROUP: tl.constexpr, HAS_OFFSET: tl.constexpr,
    HAS_REST: tl.constexpr, HALF: tl.constexpr, PARTS: tl.constexpr, SKIPS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    begin(EARLY)
    head, slot = blocks.assign(heads_beside, num_sequences, slots_each, True)
    if (head >= num_heads) | (slot >= num_slots):
        return
    sequence, block = blocks.locate(cu_q_ptr, slot, num_sequences, ROWS)
    _, q_len = blocks.bounds(cu_q_ptr, sequence, num_tokens)
    if (block < 0) | (block * ROWS >= q_len):
        return
    given = (
        q_ptr, k_ptr, v_ptr, k_descriptor, v_descriptor, o_ptr, log_rest_in_ptr, log_rest_ptr, row_carry_ptr, row_tile_ptr,
        block_stop_ptr, cu_q_ptr, cu_k_ptr, offset_ptr, maxima_ptr, num_tokens, num_keys_total, num_heads, num_stop_slots,
        max_queries, max_keys, sq_t, sq_n, sk_t, sk_n, sv_t, sv_n, first_chunk, chunk, logit_scale, threshold,
    )  # fmt: skip
    exact_from, needed = _run(
        0, sequence, block, head, *given, False, H, BH, ROWS, KEYS, KV_GROUP, HAS_OFFSET, HAS_REST, HALF, PARTS, SKIPS
    )  # fmt: skip
    while needed < exact_from:
        # The compiler does not know that this is 0. So nothing that a second walk needs is in registers during the first one.
        zero = needed >> 30
        exact_from, needed = _run(
            needed, sequence + zero, block + zero, head + zero, *given,
            True, H, BH, ROWS, KEYS, KV_GROUP, HAS_OFFSET, HAS_REST, HALF, PARTS, SKIPS,
        )  # fmt: skip


def parts(q: Tensor, convert: bool) -> int:
    """Returns in how many parts the tensor cores multiply weights and dz.

    fp16 operands that half.py does not scale need two: one would round like the result.
    """
    return 2 if q.dtype == torch.float16 and not convert else 1


def constants(q: Tensor, config: Config, group: int, convert: bool, skip_below: float) -> dict[str, int | bool]:
    """Returns the compile-time constants that all kernels share."""
    head_dim = q.shape[2]
    return {
        "H": head_dim,
        "BH": max(16, triton.next_power_of_2(head_dim)),
        "ROWS": config.row_block,
        "KEYS": config.key_block,
        "KV_GROUP": group,
        "HALF": convert,
        "PARTS": parts(q, convert),
        # In float32, the loop for the tiles near the diagonal would not fit the registers.
        "SKIPS": skip_below >= tile.LARGEST_SKIPPED and q.dtype != torch.float32,
    }


def forward(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, q_offsets: Tensor | None, log_rest_in: Tensor | None,
    max_keys: int, scale: float, skip_below: float, config: Config | None = None, first_chunk: int = 2,
    chunk: int = 64, group_bytes: int = GROUP_BYTES, max_queries: int | None = None, convert: bool | None = None,
    tma: bool = True,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Runs the forward kernel. Returns o, log_rest and what backward needs (see `ops.forward_op`).

    tma: loads tiles through descriptors where the tensors allow it. The results have the same bits without.

    block_stop: see blocks.py.
    """
    q, k, v = last_contiguous(q), last_contiguous(k), last_contiguous(v)
    num_tokens, num_heads, head_dim = q.shape
    num_sequences, group = cu_q.shape[0] - 1, num_heads // k.shape[1]
    config = config or forward_config(head_dim, q.dtype)
    convert = half.converts(q) if convert is None else convert
    o = torch.empty_like(q, memory_format=torch.contiguous_format)
    log_rest = q.new_empty((num_tokens, num_heads), dtype=torch.float32)
    rows, tiles, stops = aux_shapes(num_tokens, num_heads, num_sequences)
    row_carry, row_tile = q.new_empty(rows, dtype=carry_dtype(q.dtype)), q.new_empty(tiles, dtype=torch.int32)
    # Spare slots are never written, and operator checks compare every element, so they start as zeros.
    if convert and num_tokens > 0:
        block_stop = q.new_empty(stops, dtype=torch.int32)
        v, maxima = half.values(v, cu_k, block_stop)
    else:
        block_stop = q.new_zeros(stops, dtype=torch.int32)
        maxima = half.new_maxima(cu_k, convert)
    if num_tokens == 0:
        return o, log_rest, row_carry, row_tile, block_stop, maxima
    num_slots = num_tokens // config.row_block + num_sequences
    tensors = (
        q, k, v, *descriptors(k, v, tma), o, None if log_rest_in is None else log_rest_in.contiguous(), log_rest, row_carry,
        row_tile, block_stop, cu_q, cu_k, q_offsets, maxima if convert else None,
    )  # fmt: skip
    programs, *placed = grid(num_slots, num_sequences, num_heads, head_group(k, group, group_bytes))
    numbers = (
        num_tokens, k.shape[0], num_heads, *placed, num_sequences, num_slots, stops[1],
        max_queries or num_tokens, max_keys, *q.stride()[:2], *k.stride()[:2], *v.stride()[:2],
        first_chunk, chunk, scale * LOG2_E, log2_threshold(skip_below),
    )  # fmt: skip
    all_constants = constants(q, config, group, convert, skip_below) | launch(config)
    all_constants |= {"HAS_OFFSET": q_offsets is not None, "HAS_REST": log_rest_in is not None}
    launch_kernel(forward_kernel, programs, tensors, numbers, all_constants, follows=convert)
    return o, log_rest, row_carry, row_tile, block_stop, maxima
