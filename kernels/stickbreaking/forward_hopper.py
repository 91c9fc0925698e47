"""The forward kernel for Hopper, in Gluon: products run beside the algebra.

A tile of the other form (forward.py) waits for q·kᵀ, and for the weights times v of the tile before, because Triton waits for a
product where its result is read. Gluon lets a program wait by itself. In the loop over whole tiles,

    u = 2^logits                      while the weights of the tile before are multiplied by v
    start q·kᵀ of the next tile       into the registers of these logits, which u has replaced
    the weights of this tile          meanwhile
    start the weights times v

so that the tensor cores have work while exponentials are computed. The loads of all whole tiles go on through the tests for the
exit, and start before the diagonal. The results have the bits of the other form.

Shared memory of a program: q; a ring of STAGES tiles of K and of V, in which pair i holds V of the i-th whole tile and K of the
next one, with one barrier per pair; one tile of K and V near the diagonal.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)

from . import blocks, half, tile, walk
from .launching import begin
from .settings import COUNTS

KEYS = gl.constexpr(64)


@gluon.constexpr_function
def accumulator(width, num_warps):
    """The layout of products [ROWS, width]: 16 rows per warp and instruction."""
    return gl.NVMMADistributedLayout([3, 0], [num_warps, 1], [16, min(width, 128), 16])


@gluon.constexpr_function
def in_rows(dims, num_warps):
    """The layout of accesses to rows in global memory, 16 bytes per thread."""
    return gl.BlockedLayout([1, 8], [256 // dims, dims // 8], [num_warps, 1], [1, 0])


@gluon.constexpr_function
def shared_tile(dims):
    return gl.NVMMASharedLayout(min(128, 2 * dims), 16, 2)


@gluon.jit
def _load_tile(descriptor, key, column, barrier, to, pred, H: gl.constexpr):
    permuted = to._reinterpret(descriptor.dtype, [1, 8, 4, 2, H], descriptor.layout)
    tma.async_copy_global_to_shared(descriptor, [key, 0, 0, 0, column], barrier, permuted, pred=pred)


@gluon.jit
def _load_pair(ring, i, slot, next_slot, H: gl.constexpr):
    """Starts the loads of V of the i-th whole tile into `slot`, and of K of the next one into `next_slot`, if it is one."""
    k_descriptor, v_descriptor, k_loaded, v_loaded, k_tiles, v_tiles, top, count, column = ring
    key = top - i * KEYS
    exists = i < count
    mbarrier.expect(k_loaded.index(slot), KEYS * H * 2, pred=exists)
    mbarrier.expect(v_loaded.index(slot), KEYS * H * 2, pred=exists)
    # Behind the last tile, K is of another sequence, or zeros. It is not used.
    _load_tile(k_descriptor, key - KEYS, column, k_loaded.index(slot), k_tiles.index(next_slot), exists, H)
    _load_tile(v_descriptor, key, column, v_loaded.index(slot), v_tiles.index(slot), exists, H)


@gluon.jit
def _start(ring, nearest, near, STAGES: gl.constexpr, H: gl.constexpr):
    """Starts the first loads: of the tile that starts at key `nearest` if `near`, and of the ring."""
    k_descriptor, v_descriptor, k_loaded, v_loaded, k_tiles, v_tiles, top, count, column = ring
    for i in gl.static_range(STAGES + 1):
        mbarrier.init(k_loaded.index(i), 1)
        mbarrier.init(v_loaded.index(i), 1)
    fence_async_shared()
    near_loaded, first_loaded = v_loaded.index(STAGES), k_loaded.index(STAGES)
    mbarrier.expect(near_loaded, 2 * KEYS * H * 2, pred=near)
    mbarrier.expect(first_loaded, KEYS * H * 2, pred=count > 0)
    _load_tile(k_descriptor, nearest, column, near_loaded, k_tiles.index(STAGES), near, H)
    _load_tile(v_descriptor, nearest, column, near_loaded, v_tiles.index(STAGES), near, H)
    _load_tile(k_descriptor, top, column, first_loaded, k_tiles.index(0), count > 0, H)
    for i in gl.static_range(STAGES - 1):
        _load_pair(ring, i, i, i + 1, H)


@gluon.jit
def _finish(ring, done, STAGES: gl.constexpr):
    """Waits for the loads of the ring that are under way after `done` of its tiles: shared memory must outlast them."""
    _, _, k_loaded, v_loaded, _, _, _, count, _ = ring
    mbarrier.wait(k_loaded.index(STAGES), 0, pred=count > 0)
    for ahead in gl.static_range(STAGES - 1):
        i = done + ahead
        mbarrier.wait(k_loaded.index(i % STAGES), i // STAGES % 2, pred=i < count)
        mbarrier.wait(v_loaded.index(i % STAGES), i // STAGES % 2, pred=i < count)
    for i in gl.static_range(STAGES + 1):
        mbarrier.invalidate(k_loaded.index(i))
        mbarrier.invalidate(v_loaded.index(i))


@gluon.jit
def walk_tiles(
    state, q, source, first, count, position, num_keys, logit_scale, floor,
    MASKED: gl.constexpr, EXACT: gl.constexpr, ROWS: gl.constexpr, KEYS: gl.constexpr, H: gl.constexpr, BH: gl.constexpr,
    HALF: gl.constexpr, PARTS: gl.constexpr, SKIPS: gl.constexpr,
):  # fmt: skip
    """As walk.walk_tiles, for bf16. q: in shared memory.

    state, behind that of walk.walk_tiles: how many tiles of the ring were processed, the products of the next one, which tile
    they are of (-1: none), and which tile the last place of k_tiles and v_tiles holds.
    source: pointers and strides of K and V, the sequence's first key, and the head; the ring; whether the tile near the
    diagonal was loaded with it. The ring: descriptors, barriers, tiles, its first key, how many whole tiles it has, and the
    head's first column.
    """
    if MASKED:
        state = _masked_tiles(
            state, q, source, first, count, position, num_keys, logit_scale, floor, EXACT, ROWS, H, SKIPS
        )  # fmt: skip
    else:
        state = _whole_tiles(state, q, source, first, count, logit_scale, floor, ROWS, H, SKIPS)
    return state


@gluon.jit
def _load_rows(source, t, num_keys, STAGES: gl.constexpr, H: gl.constexpr):
    """Loads tile t through pointers into the last place of k_tiles and v_tiles. Keys from num_keys on are zeros."""
    k_ptr, v_ptr, sk_t, sk_n, sv_t, sv_n, k_start, kv_head = source[0]
    rows: gl.constexpr = in_rows(H, gl.num_warps())
    key = tile.key_of(gl.arange(0, KEYS, gl.SliceLayout(1, rows)), KEYS)
    dims = gl.arange(0, H, gl.SliceLayout(0, rows))
    token = (k_start + t * KEYS).to(gl.int64)
    exists = (t * KEYS + key < num_keys)[:, None]
    k = gl.load(k_ptr + (token * sk_t + kv_head * sk_n) + (key[:, None] * sk_t + dims[None, :]), exists, 0.0)
    v = gl.load(v_ptr + (token * sv_t + kv_head * sv_n) + (key[:, None] * sv_t + dims[None, :]), exists, 0.0)
    source[1][4].index(STAGES).store(k)
    source[1][5].index(STAGES).store(v)
    fence_async_shared()


@gluon.jit
def _masked_tiles(
    state, q, source, first, count, position, num_keys, logit_scale, floor,
    EXACT: gl.constexpr, ROWS: gl.constexpr, H: gl.constexpr, SKIPS: gl.constexpr,
):  # fmt: skip
    """Processes tiles near the diagonal, one after the other, with masks."""
    _, _, k_loaded, v_loaded, k_tiles, v_tiles, top, _, _ = source[1]
    STAGES: gl.constexpr = k_tiles.shape[0] - 1
    acc, carry, row_carry, row_tile, worst, done, products, ready, held = state
    scores: gl.constexpr = accumulator(KEYS, gl.num_warps())
    out: gl.constexpr = acc.type.layout
    for step in range(count):
        t = first - step
        alive = carry > floor
        row_carry = gl.where(alive, carry, row_carry)
        row_tile = gl.where(alive, t, row_tile)
        in_ring = source[0][6] + t * KEYS == top
        mbarrier.wait(k_loaded.index(STAGES), 0, pred=in_ring)
        mbarrier.wait(v_loaded.index(0), 0, pred=in_ring)
        mbarrier.wait(v_loaded.index(STAGES), 0, pred=source[2])
        if (t != held) & (in_ring == 0):
            _load_rows(source, t, num_keys, STAGES, H)
            held = t
        slot = gl.where(in_ring, 0, STAGES)
        zeros = gl.zeros([ROWS, KEYS], gl.float32, scores)
        now = warpgroup_mma(q, k_tiles.index(slot).permute([1, 0]), zeros, use_acc=False)
        now, scale = tile.scale_live(now, alive, logit_scale, SKIPS)
        _u, t_, w, after, spent = tile.spend(now, scale, position - t * KEYS, True, EXACT, ROWS)
        a, carry, worst = walk.take(t_, w, after, spent, carry, worst, EXACT, True, False)
        acc = warpgroup_mma(_operand(a, v_tiles.dtype, out, ROWS), v_tiles.index(slot), acc)
    return acc, carry, row_carry, row_tile, worst, done, products, ready, held


@gluon.jit
def _operand(a, dtype: gl.constexpr, out: gl.constexpr, ROWS: gl.constexpr):
    """Returns the weights as the first operand of a product with a tile of v."""
    scores: gl.constexpr = accumulator(KEYS, gl.num_warps())
    x = gl.convert_layout(tile.put_together(a, ROWS), scores, assert_trivial=True).to(dtype)
    return gl.convert_layout(x, gl.DotOperandLayout(0, out, 2))


@gluon.jit
def _whole_tiles(
    state, q, source, first, count, logit_scale, floor, ROWS: gl.constexpr, H: gl.constexpr, SKIPS: gl.constexpr
):  # fmt: skip
    """Processes tiles that all rows see as a whole, with the fast algebra."""
    ring = source[1]
    _, _, k_loaded, v_loaded, k_tiles, v_tiles, top, _, _ = ring
    STAGES: gl.constexpr = k_tiles.shape[0] - 1
    acc, carry, row_carry, row_tile, worst, done, products, ready, held = state
    scores: gl.constexpr = accumulator(KEYS, gl.num_warps())
    out: gl.constexpr = acc.type.layout
    i = (top - source[0][6]) // KEYS - first
    for skipped in range(done, i):  # a tile that was processed exactly, with those near the diagonal
        mbarrier.wait(k_loaded.index(skipped % STAGES), skipped // STAGES % 2)
        mbarrier.wait(v_loaded.index(skipped % STAGES), skipped // STAGES % 2)
        _load_pair(ring, skipped + STAGES - 1, (skipped + STAGES - 1) % STAGES, skipped % STAGES, H)
    slot = i % STAGES
    phase = i // STAGES % 2
    q = q.load(gl.DotOperandLayout(0, scores, 2))
    if ready != i:
        mbarrier.wait(k_loaded.index(STAGES), 0)
        products = warpgroup_mma(q, k_tiles.index(slot).permute([1, 0]), products, use_acc=False)
    a16 = gl.zeros([ROWS, KEYS], v_tiles.dtype, gl.DotOperandLayout(0, out, 2))
    under_way = warpgroup_mma_init(acc)
    for step in range(count):
        alive = carry > floor
        row_carry = gl.where(alive, carry, row_carry)
        row_tile = gl.where(alive, first - step, row_tile)
        products, scale = tile.scale_live(products, alive, logit_scale, SKIPS)
        z = tile.logits(products, scale, ROWS)
        next_slot = gl.where(slot == STAGES - 1, 0, slot + 1)
        mbarrier.wait(k_loaded.index(slot), phase)
        next_products = warpgroup_mma(
            q, k_tiles.index(next_slot).permute([1, 0]), products, use_acc=False, is_async=True
        )  # fmt: skip
        # ptxas would move the start of the product behind the algebra, if no branch were between them.
        mbarrier.wait(v_loaded.index(slot), phase)
        t, w, after, spent = tile.spend_powers(tile.powers(z))
        a, carry, worst = walk.take(t, w, after, spent, carry, worst, False, True, False)
        # The weights of the tile before have been multiplied if only one product is under way.
        acc, a16 = warpgroup_mma_wait(1, [under_way, a16])
        a16 = _operand(a, v_tiles.dtype, out, ROWS)
        under_way = warpgroup_mma(a16, v_tiles.index(slot), acc, is_async=True)
        # K of this tile and V of the one before are no longer needed.
        last_slot = gl.where(slot == 0, STAGES - 1, slot - 1)
        _load_pair(ring, i + step + STAGES - 1, last_slot, slot, H)
        products = warpgroup_mma_wait(1, [next_products])
        phase = gl.where(next_slot == 0, phase ^ 1, phase)
        slot = next_slot
    acc = warpgroup_mma_wait(0, [under_way])
    return acc, carry, row_carry, row_tile, worst, i + count, products, i + count, held


@gluon.jit
def _run(
    needed, sequence, block, head, memory,
    q_ptr, k_ptr, v_ptr, k_descriptor, v_descriptor, o_ptr, log_rest_in_ptr, log_rest_ptr, row_carry_ptr, row_tile_ptr,
    block_stop_ptr, cu_q_ptr, cu_k_ptr, offset_ptr, maxima_ptr, num_tokens, num_keys_total, num_heads, num_stop_slots,
    max_queries, max_keys, sq_t, sq_n, sk_t, sk_n, sv_t, sv_n, first_chunk, chunk, logit_scale, threshold,
    AGAIN: gl.constexpr, H: gl.constexpr, ROWS: gl.constexpr, KV_GROUP: gl.constexpr, HAS_OFFSET: gl.constexpr,
    HAS_REST: gl.constexpr, SKIPS: gl.constexpr,
):  # fmt: skip
    """As forward._run, in the shared memory of the program."""
    q_start, q_len, k_start, k_len, offset = blocks.lengths(
        cu_q_ptr, cu_k_ptr, offset_ptr, sequence, num_tokens, num_keys_total, HAS_OFFSET
    )
    q, k_loaded, v_loaded, k_tiles, v_tiles = memory
    STAGES: gl.constexpr = k_tiles.shape[0] - 1
    scores: gl.constexpr = accumulator(KEYS, gl.num_warps())
    per_lane: gl.constexpr = tile.take_apart(gl.zeros([ROWS, KEYS], gl.float32, scores), ROWS)[0].type.layout
    per_row: gl.constexpr = gl.SliceLayout(1, per_lane)
    row = block * ROWS + gl.arange(0, ROWS, per_row)
    row_ok = row < q_len
    position, whole, seen = blocks.visible(block, row, q_len, k_len, offset, ROWS, KEYS)
    count = needed if AGAIN else whole
    kv_head = head // KV_GROUP
    top = k_start + (count - 1) * KEYS
    ring = (k_descriptor, v_descriptor, k_loaded, v_loaded, k_tiles, v_tiles, top, count, kv_head * H)
    # TMA would load keys of the next sequence as well.
    near = (seen > count) & (seen * KEYS <= k_len)
    source = ((k_ptr, v_ptr, sk_t, sk_n, sv_t, sv_n, k_start, kv_head), ring, near)
    _start(ring, k_start + (seen - 1) * KEYS, near, STAGES, H)

    rows: gl.constexpr = in_rows(H, gl.num_warps())
    place = block * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, rows))
    dims = gl.arange(0, H, gl.SliceLayout(0, rows))
    own = (q_start + place).to(gl.int64)
    loaded = blocks.load_rows(q_ptr, own, sq_t, head, sq_n, place < q_len, dims, H)
    q.store(loaded)
    if not AGAIN:
        half.enter(maxima_ptr, sequence, half.Q, loaded)
    fence_async_shared()

    token = (q_start + row).to(gl.int64)
    entering = gl.zeros([ROWS], gl.float32, per_row)
    if HAS_REST:
        entering = gl.load(log_rest_in_ptr + token * num_heads + head, row_ok, 0.0).to(gl.float32)
    # Rows after the sequence's end must not delay the exit.
    entering = gl.where(row_ok, entering * tile.LOG2_E, -1e30).to(row_carry_ptr.dtype.element_ty)
    carry = tile.per_row(entering)
    fresh = (
        gl.zeros([ROWS, H], gl.float32, accumulator(H, gl.num_warps())),
        carry,
        carry,
        gl.full([ROWS, 4], blocks.NEVER, gl.int32, per_lane),
        gl.zeros([ROWS, 4], gl.float32, per_lane),
        count - count,
        gl.zeros([ROWS, KEYS], gl.float32, scores),
        count - count - 1,
        gl.where(near, seen - 1, -1),
    )
    way = (fresh, entering, q, source, position, whole, seen, 0, k_len, logit_scale, threshold, first_chunk, chunk)
    if AGAIN:
        state, stop, exact_from, needed = walk.walk_again(*way, needed, walk_tiles, ROWS, KEYS, H, H, True, 1, SKIPS)
    else:
        state, stop, exact_from, needed = walk.walk_rows(*way, walk_tiles, ROWS, KEYS, H, H, True, 1, SKIPS)
    _finish(ring, state[5], STAGES)
    scale = walk.scale_of_results(q_len, k_len, max_queries, max_keys, maxima_ptr, sequence, True)
    q.store((state[0] * scale).to(q.dtype))
    # The compiler does not know that this is 0. So the places of results are in no registers during the walk.
    zero = exact_from >> 30
    row = (block + zero) * ROWS + gl.arange(0, ROWS, per_row)
    row_ok = row < q_len
    token = (q_start + row).to(gl.int64)
    place = (block + zero) * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, rows))
    own = (q_start + place).to(gl.int64)
    gl.store(o_ptr + (own * num_heads + head)[:, None] * H + dims[None, :], q.load(rows), (place < q_len)[:, None])
    walk.save_sticks(
        state, stop, exact_from, log_rest_ptr, row_carry_ptr, row_tile_ptr, block_stop_ptr, cu_q_ptr, sequence, head, block,
        token, row_ok, num_tokens, num_heads, q_len, num_stop_slots, threshold, ROWS,
    )  # fmt: skip
    return exact_from, needed


@gluon.jit(do_not_specialize=COUNTS)
def forward_hopper_kernel(
    q_ptr, k_ptr, v_ptr, k_descriptor, v_descriptor, o_ptr, log_rest_in_ptr, log_rest_ptr, row_carry_ptr, row_tile_ptr,
    block_stop_ptr, cu_q_ptr, cu_k_ptr, offset_ptr, maxima_ptr,
    num_tokens, num_keys_total, num_heads, heads_beside, slots_each, num_sequences, num_slots, num_stop_slots, max_queries,
    max_keys, sq_t, sq_n, sk_t, sk_n, sv_t, sv_n, first_chunk, chunk, logit_scale, threshold,
    H: gl.constexpr, ROWS: gl.constexpr, KV_GROUP: gl.constexpr, HAS_OFFSET: gl.constexpr, HAS_REST: gl.constexpr,
    SKIPS: gl.constexpr, STAGES: gl.constexpr, EARLY: gl.constexpr,
):  # fmt: skip
    """As forward.forward_kernel, for bf16 of which v was converted to fp16."""
    begin(EARLY)
    head, slot = blocks.assign(heads_beside, num_sequences, slots_each, True)
    if (head >= num_heads) | (slot >= num_slots):
        return
    sequence, block = blocks.locate(cu_q_ptr, slot, num_sequences, ROWS)
    _, q_len = blocks.bounds(cu_q_ptr, sequence, num_tokens)
    if (block < 0) | (block * ROWS >= q_len):
        return
    shared: gl.constexpr = shared_tile(H)
    memory = (
        gl.allocate_shared_memory(q_ptr.dtype.element_ty, [ROWS, H], shared),
        gl.allocate_shared_memory(gl.int64, [STAGES + 1, 1], mbarrier.MBarrierLayout()),
        gl.allocate_shared_memory(gl.int64, [STAGES + 1, 1], mbarrier.MBarrierLayout()),
        gl.allocate_shared_memory(k_ptr.dtype.element_ty, [STAGES + 1, KEYS, H], shared),
        gl.allocate_shared_memory(v_ptr.dtype.element_ty, [STAGES + 1, KEYS, H], shared),
    )
    given = (
        q_ptr, k_ptr, v_ptr, k_descriptor, v_descriptor, o_ptr, log_rest_in_ptr, log_rest_ptr, row_carry_ptr, row_tile_ptr,
        block_stop_ptr, cu_q_ptr, cu_k_ptr, offset_ptr, maxima_ptr, num_tokens, num_keys_total, num_heads, num_stop_slots,
        max_queries, max_keys, sq_t, sq_n, sk_t, sk_n, sv_t, sv_n, first_chunk, chunk, logit_scale, threshold,
    )  # fmt: skip
    exact_from, needed = _run(
        0, sequence, block, head, memory, *given, False, H, ROWS, KV_GROUP, HAS_OFFSET, HAS_REST, SKIPS
    )
    while needed < exact_from:
        # The compiler does not know that this is 0. So nothing that a second walk needs is in registers during the first one.
        zero = needed >> 30
        exact_from, needed = _run(
            needed, sequence + zero, block + zero, head + zero, memory, *given,
            True, H, ROWS, KV_GROUP, HAS_OFFSET, HAS_REST, SKIPS,
        )  # fmt: skip
