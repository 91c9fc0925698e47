"""Phase two of the backward pass for Hopper, in Gluon: products run beside the algebra.

The other form (dkv.py) has two programs per multiprocessor, and each waits for its products where they are read. Here, in the
loop over row blocks that are seen as a whole,

    z = logits of this block
    start dO·vᵀ of this block, then q·kᵀ of the next one     into the registers of these logits, which z has replaced
    weights                                                  meanwhile
    wait for dO·vᵀ, which comes after the sums of the block before; gradients of z
    store weights and gradients of z, start both sums        their transposed operands are in shared memory

Row blocks come through TMA, in a ring of STAGES. The results have the bits of the other form.
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

from . import blocks, half, scales, tile
from .dkv import by_words, row_blocks
from .forward_hopper import KEYS, accumulator, in_rows, shared_tile
from .launching import begin
from .settings import COUNTS


@gluon.jit
def _load_block(memory, place, turn, block, pred, STAGES: gl.constexpr, ROWS: gl.constexpr, H: gl.constexpr):
    """Starts the loads of q and dO of a row block, as number `turn` of the ring, if `pred`."""
    q_descriptor, do_descriptor, loaded, q_tiles, do_tiles = memory[:5]
    first, column = place
    slot = turn % STAGES
    barrier = loaded.index(slot)
    mbarrier.expect(barrier, 2 * ROWS * H * 2, pred=pred)
    row = first + block * ROWS
    tma.async_copy_global_to_shared(q_descriptor, [row, column], barrier, q_tiles.index(slot), pred=pred)
    tma.async_copy_global_to_shared(do_descriptor, [row, column], barrier, do_tiles.index(slot), pred=pred)


@gluon.jit
def run_blocks(
    state, memory, rows, q_ptr, do_ptr, sq_t, sq_n, so_t, so_n, carry_ptr, behind_ptr, scratch_head, head, bits, first, last, t,
    offset, q_len, num_keys, logit_scale, MASKED: gl.constexpr, EXACT: gl.constexpr, ROWS: gl.constexpr, KEYS: gl.constexpr,
    H: gl.constexpr, BH: gl.constexpr, HOIST: gl.constexpr, PARTS: gl.constexpr, SKIPS: gl.constexpr, HAS_REST: gl.constexpr,
):  # fmt: skip
    """As dkv.run_blocks. state: dk, dv, and how many row blocks the ring has loaded.

    memory: descriptors of q and dO, barriers, tiles of q and dO, k and v, weights and gradients of logits, and a barrier that
    has been passed. rows: the first row and the first head's column for TMA.
    """
    # Rows that do not exist would come from other sequences.
    partial = q_len // ROWS
    given = (
        q_ptr + head * sq_n,
        do_ptr + head * so_n,
        sq_t,
        so_t,
        carry_ptr + head * scratch_head,
        behind_ptr + head * scratch_head,
    )
    keys = (t, offset, q_len, num_keys, logit_scale)
    if bits is None:
        for block in range(first, last):
            state = _one_block(state, memory, *given, block, *keys, MASKED, EXACT, ROWS, H, SKIPS, HAS_REST)
    elif MASKED:
        for _n in range(first, last):
            block = first + blocks.lowest(bits)
            bits &= bits - 1
            state = _one_block(state, memory, *given, block, *keys, True, EXACT, ROWS, H, SKIPS, HAS_REST)
    else:
        place = partial - first
        inside = (place >= 0) & (place < blocks.WORD)
        cut = gl.where(inside, ((bits >> gl.where(inside, place, 0)) & 1).to(gl.int32), 0)
        state = _whole_blocks(
            state, memory, (rows[0], rows[1] + head * H), *given[4:], bits, first, last - first - cut, logit_scale,
            ROWS, H, SKIPS, HAS_REST,
        )  # fmt: skip
        for _ in range(cut):
            state = _one_block(state, memory, *given, partial, *keys, False, False, ROWS, H, SKIPS, HAS_REST)
    return state


@gluon.jit
def _one_block(
    state, memory, q_rows, do_rows, sq_t, so_t, carries, behinds, block, t, offset, q_len, num_keys, logit_scale,
    MASKED: gl.constexpr, EXACT: gl.constexpr, ROWS: gl.constexpr, H: gl.constexpr, SKIPS: gl.constexpr, HAS_REST: gl.constexpr,
):  # fmt: skip
    """Adds one row block, whose rows may not all exist."""
    _, _, _, q_tiles, do_tiles, k, v, weights, gradients, _, _ = memory
    dk, dv, turn = state
    STAGES: gl.constexpr = q_tiles.shape[0] - 1
    wide: gl.constexpr = in_rows(H, gl.num_warps())
    scores: gl.constexpr = accumulator(KEYS, gl.num_warps())
    first_row = block * ROWS
    row = gl.arange(0, ROWS, gl.SliceLayout(1, wide))
    dims = gl.arange(0, H, gl.SliceLayout(0, wide))
    exists = (first_row + row < q_len)[:, None]
    first64 = first_row.to(gl.int64)
    q = gl.load(q_rows + first64 * sq_t + (row[:, None] * sq_t + dims[None, :]), exists, 0.0)
    do = gl.load(do_rows + first64 * so_t + (row[:, None] * so_t + dims[None, :]), exists, 0.0)
    q_tile, do_tile = q_tiles.index(STAGES), do_tiles.index(STAGES)
    q_tile.store(q)
    do_tile.store(do)
    fence_async_shared()
    zeros = gl.zeros([ROWS, KEYS], gl.float32, scores)
    products = warpgroup_mma(q_tile, k.permute([1, 0]), zeros, use_acc=False)
    d = warpgroup_mma(do_tile, v.permute([1, 0]), zeros, use_acc=False)
    local = gl.arange(0, ROWS, gl.SliceLayout(1, tile.take_apart(zeros, ROWS)[0].type.layout))
    carry = gl.load(carries + first64 + local, first_row + local < q_len, -1e30)
    behind = tile.per_row(gl.load(behinds + first64 + local, first_row + local < q_len, 0.0))
    products, scale = tile.scale_live(products, tile.per_row(carry > -1e29), logit_scale, SKIPS)
    position = gl.minimum(offset + first_row + local, num_keys)
    u, t_, w, after, spent = tile.spend(products, scale, position - t * KEYS, MASKED, EXACT, ROWS)
    nearer, _total = tile.lane_sums(spent, True)
    rest = carry[:, None] - nearer
    da = tile.take_apart(d, ROWS)
    if EXACT:
        p = tile.factors(w, after, rest, None, True, False)
        a = tile.weigh(t_, p, True)
        dz, _sum = tile.logit_gradients(u, t_, w, p, da, behind, True)
    else:
        a, divisor = _weights(t_, w, after, rest, SKIPS)
        dz = tile.logit_gradients_of_weights(u, w, a, divisor, da, behind, SKIPS and HAS_REST)
    _store(weights, a, scores, ROWS)
    _store(gradients, dz, scores, ROWS)
    fence_async_shared()
    dv = warpgroup_mma(weights.permute([1, 0]), do_tile, dv)
    dk = warpgroup_mma(gradients.permute([1, 0]), q_tile, dk)
    return dk, dv, turn


@gluon.jit
def _weights(t, w, after, rest, SKIPS: gl.constexpr):
    """Returns the weights of a tile in the fast algebra, and by how much of the stick gradients are divided, in bits."""
    divisor = gl.maximum(rest, tile.LEAST_SKIPPING if SKIPS else tile.LEAST)
    if not SKIPS:
        rest = divisor
    return tile.weigh(t, tile.factors(w, after, rest, None, False, False), False), divisor


@gluon.jit
def _store(to, keys, layout: gl.constexpr, ROWS: gl.constexpr):
    """Stores what take_apart takes apart, in the dtype of shared memory."""
    to.store(gl.convert_layout(tile.put_together(keys, ROWS), layout, assert_trivial=True).to(to.dtype))


@gluon.jit
def _whole_blocks(
    state, memory, place, carries, behinds, bits, first, count, logit_scale,
    ROWS: gl.constexpr, H: gl.constexpr, SKIPS: gl.constexpr, HAS_REST: gl.constexpr,
):  # fmt: skip
    """Adds `count` row blocks that see the tile as a whole, those from `first` on whose bit is set."""
    _, _, loaded, q_tiles, do_tiles, k, v, weights, gradients, gate, nothing = memory
    dk, dv, turn = state
    STAGES: gl.constexpr = q_tiles.shape[0] - 1
    scores: gl.constexpr = accumulator(KEYS, gl.num_warps())
    zeros = gl.zeros([ROWS, KEYS], gl.float32, scores)
    local = gl.arange(0, ROWS, gl.SliceLayout(1, tile.take_apart(zeros, ROWS)[0].type.layout))
    # Blocks ahead of the present one: what the ring loads, and whose carries are loaded next.
    block = first + blocks.lowest(bits)
    bits &= bits - 1
    following = first + blocks.lowest(bits)
    bits &= bits - 1
    _load_block(memory, place, turn, block, count > 0, STAGES, ROWS, H)
    _load_block(memory, place, turn + 1, following, count > 1, STAGES, ROWS, H)
    carry = gl.load(carries + block * ROWS + local, count > 0, -1e30)
    behind = gl.load(behinds + block * ROWS + local, count > 0, 0.0)
    slot = turn % STAGES
    phase = turn // STAGES % 2
    mbarrier.wait(loaded.index(slot), phase, pred=count > 0)
    products = warpgroup_mma(q_tiles.index(slot), k.permute([1, 0]), zeros, use_acc=False)
    d = zeros
    # Zeros are added, because ptxas would run all products of the loop one by one if anything but a product had defined their sums.
    dv = warpgroup_mma(nothing[0].permute([1, 0]), nothing[1], dv, is_async=True)
    dk = warpgroup_mma(nothing[0].permute([1, 0]), nothing[1], dk, is_async=True)
    for n in range(count):
        more = n + 1 < count
        products, scale = tile.scale_live(products, tile.per_row(carry > -1e29), logit_scale, SKIPS)
        z = tile.logits(products, scale, ROWS)
        next_slot = gl.where(slot == STAGES - 1, 0, slot + 1)
        next_phase = gl.where(next_slot == 0, phase ^ 1, phase)
        d_under_way = warpgroup_mma(do_tiles.index(slot), v.permute([1, 0]), d, use_acc=False, is_async=True)
        mbarrier.wait(loaded.index(next_slot), next_phase, pred=more)
        next_products = warpgroup_mma(
            q_tiles.index(next_slot), k.permute([1, 0]), products, use_acc=False, is_async=True
        )  # fmt: skip
        # ptxas would move the start of the products behind the algebra, if no branch were between them.
        mbarrier.wait(gate, 0)
        u = tile.powers(z)
        t, w, after, spent = tile.spend_powers(u)
        nearer, _total = tile.lane_sums(spent, True)
        a, divisor = _weights(t, w, after, carry[:, None] - nearer, SKIPS)
        farther = tile.per_row(behind)
        carry = gl.load(carries + following * ROWS + local, more, -1e30)
        behind = gl.load(behinds + following * ROWS + local, more, 0.0)
        # What was started before q·kᵀ of the next block has ended: dO·vᵀ, and both sums of the block before.
        d, dk_sum, dv_sum = warpgroup_mma_wait(1, [d_under_way, dk, dv])
        dz = tile.logit_gradients_of_weights(u, w, a, divisor, tile.take_apart(d, ROWS), farther, SKIPS and HAS_REST)
        _store(weights, a, scores, ROWS)
        _store(gradients, dz, scores, ROWS)
        fence_async_shared()
        dv = warpgroup_mma(weights.permute([1, 0]), do_tiles.index(slot), dv_sum, is_async=True)
        dk = warpgroup_mma(gradients.permute([1, 0]), q_tiles.index(slot), dk_sum, is_async=True)
        following = first + blocks.lowest(bits)
        bits &= bits - 1
        _load_block(memory, place, turn + n + 2, following, n + 2 < count, STAGES, ROWS, H)
        products = warpgroup_mma_wait(2, [next_products])
        slot = next_slot
        phase = next_phase
    dk, dv = warpgroup_mma_wait(0, [dk, dv])
    return dk, dv, turn + count


@gluon.jit(do_not_specialize=COUNTS)
def dkv_hopper_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, dk_ptr, dv_ptr, q_descriptor, do_descriptor, block_stop_ptr, scratch_ptr, cu_q_ptr, cu_k_ptr,
    offset_ptr, maxima_ptr, rest_max_ptr, num_tokens, num_keys_total, num_kv_heads, heads_beside, slots_each, num_sequences,
    first_slot, last_slot, num_key_slots, num_stop_slots, num_tiles, scratch_rows, sq_t, sq_n, sk_t, sk_n, sv_t, sv_n,
    so_t, so_n, scale, logit_scale,
    H: gl.constexpr, ROWS: gl.constexpr, DQ_ROWS: gl.constexpr, KV_GROUP: gl.constexpr, HAS_OFFSET: gl.constexpr,
    HAS_REST: gl.constexpr, ADD: gl.constexpr, SKIPS: gl.constexpr, STAGES: gl.constexpr, EARLY: gl.constexpr,
):  # fmt: skip
    """As dkv.dkv_kernel by words, for bf16 of which q, k and dO were converted to fp16."""
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
    row_first, first, whole_from, end, scratch_row = row_blocks(
        t, offset, q_len, k_len, cu_q_ptr, sequence, first_slot, last_slot, ROWS, KEYS, DQ_ROWS, 0
    )
    if ADD & (first >= end):
        return
    shared: gl.constexpr = shared_tile(H)
    half_type: gl.constexpr = q_ptr.dtype.element_ty
    memory = (
        q_descriptor,
        do_descriptor,
        gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout()),
        gl.allocate_shared_memory(half_type, [STAGES + 1, ROWS, H], shared),
        gl.allocate_shared_memory(half_type, [STAGES + 1, ROWS, H], shared),
        gl.allocate_shared_memory(half_type, [KEYS, H], shared),
        gl.allocate_shared_memory(half_type, [KEYS, H], shared),
        gl.allocate_shared_memory(half_type, [ROWS, KEYS], shared_tile(KEYS)),
        gl.allocate_shared_memory(half_type, [ROWS, KEYS], shared_tile(KEYS)),
        gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout()),
        (
            gl.allocate_shared_memory(half_type, [16, KEYS], shared_tile(KEYS)),
            gl.allocate_shared_memory(half_type, [16, H], shared),
        ),
    )
    for i in gl.static_range(STAGES):
        mbarrier.init(memory[2].index(i), 1)
    mbarrier.init(memory[9], 1)
    mbarrier.arrive(memory[9])
    q_shift, k_shift, v_shift, do_shift, weight_shift, dz_shift = scales.shifts(
        maxima_ptr, rest_max_ptr, sequence, H, HAS_REST
    )
    wide: gl.constexpr = in_rows(H, gl.num_warps())
    key = t * KEYS + tile.key_of(gl.arange(0, KEYS, gl.SliceLayout(1, wide)), KEYS)
    dims = gl.arange(0, H, gl.SliceLayout(0, wide))
    token = (k_start + key).to(gl.int64)
    exists = (key < k_len)[:, None]
    memory[5].store(gl.load(k_ptr + token[:, None] * sk_t + kv_head * sk_n + dims[None, :], exists, 0.0))
    v = gl.load(v_ptr + token[:, None] * sv_t + kv_head * sv_n + dims[None, :], exists, 0.0)
    memory[6].store(half.scaled(v, v_shift))
    memory[10][0].store(gl.zeros([16, KEYS], half_type, in_rows(KEYS, gl.num_warps())))
    memory[10][1].store(gl.zeros([16, H], half_type, wide))
    fence_async_shared()
    # Blocks are counted from the first block of the slice, so that they fit the scratch of one slice.
    base, first_head = row_first // ROWS, kv_head * KV_GROUP
    first64 = (q_start + base * ROWS).to(gl.int64)
    scratch_step = scratch_rows.to(gl.int64) * 2
    scratch_head = scratch_step * num_tiles
    scratch_ptr += first_head * scratch_head + t * scratch_step + (scratch_row + base * ROWS)
    rows = (
        memory, (q_start + base * ROWS, first_head * H), q_ptr + (first64 * sq_t + first_head * sq_n),
        do_ptr + (first64 * so_t + first_head * so_n), sq_t, sq_n, so_t, so_n, scratch_ptr, scratch_ptr + scratch_rows,
        scratch_head,
    )  # fmt: skip
    keys = (t, offset + base * ROWS, q_len - base * ROWS, k_len, logit_scale * gl.exp2(-q_shift - k_shift))
    out: gl.constexpr = accumulator(H, gl.num_warps())
    zeros = gl.zeros([KEYS, H], gl.float32, out)
    word = gl.arange(0, 64, gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
    state, visited = by_words(
        (zeros, zeros, t - t), rows, keys, (block_stop_ptr, cu_q_ptr, sequence), word, first_head, base, first, whole_from, end,
        q_len, num_stop_slots, run_blocks, ROWS, KEYS, H, H, KV_GROUP, 0, 1, SKIPS, HAS_REST,
    )  # fmt: skip
    dk, dv, _turn = state
    # The compiler does not know that this adds 0. So it keeps no places in registers during the walk.
    t += visited >> 30
    key = t * KEYS + tile.key_of(gl.arange(0, KEYS, gl.SliceLayout(1, out)), KEYS)
    places = ((k_start + key).to(gl.int64)[:, None] * num_kv_heads + kv_head) * H + gl.arange(
        0, H, gl.SliceLayout(0, out)
    )[None, :]
    exists = (key < k_len)[:, None]
    results = ((dk_ptr, dk * (scale * gl.exp2(-dz_shift - q_shift))), (dv_ptr, dv * gl.exp2(-weight_shift - do_shift)))
    for i in gl.static_range(2):
        to, x = results[i]
        if ADD:
            exists = exists & (visited > 0)
            x += gl.load(to + places, exists, 0.0)
        gl.store(to + places, x.to(to.dtype.element_ty), exists)
