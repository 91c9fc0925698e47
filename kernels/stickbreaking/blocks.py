"""Where a program of the kernels stands, which tiles its rows attend to, and where forward stopped.

block_stop holds two tiles per 64 rows and head: the farthest one that forward visited, and the one from which on the rows
need the exact algebra, because they spend more than the fast one can express (`tile.RANGE`). If they never do, that is the
number of tiles that they see.
"""

import triton
import triton.language as tl

from . import tile

NEVER = tl.constexpr(1 << 30)
# For so many blocks after those on the diagonal of a tile, it can be the tile after their own diagonal: for two if offsets do
# not align with tiles.
NEAR = tl.constexpr(2)
# Row blocks that one word of 64 bits tells of.
WORD = tl.constexpr(64)
# Rows per granule, the unit in which forward reports where it stopped.
STOP_ROWS = tl.constexpr(64)


@triton.jit
def locate(cu_seqlens, slot, num_sequences, ROWS: tl.constexpr):
    """Returns the sequence of slot `slot`, and which of its blocks the slot is.

    Sequence i owns the slots from cu_seqlens[i] // ROWS + i on. These are enough for its blocks wherever it starts.
    This costs one spare slot per sequence and needs no table.
    """
    low = 0
    high = num_sequences
    while high - low > 1:
        middle = (low + high) // 2
        if tl.load(cu_seqlens + middle).to(tl.int32) // ROWS + middle <= slot:
            low = middle
        else:
            high = middle
    first = tl.load(cu_seqlens + low).to(tl.int32) // ROWS + low
    return low, slot - first


@triton.jit
def assign(heads_beside, num_sequences, slots_each, LAST_FIRST: tl.constexpr):
    """Returns the head and slot of this program. Both may be beyond the last one (`settings.grid`).

    `heads_beside` heads take turns. Each takes the first block of all sequences, then the second one, and so on; with
    LAST_FIRST, from the last one on. Sequences count as equally long, with `slots_each` blocks.
    """
    program = tl.program_id(0)
    place = (program.to(tl.uint32) // heads_beside.to(tl.uint32)).to(tl.int32)
    head = tl.program_id(1) * heads_beside + (program - place * heads_beside)
    block = (place.to(tl.uint32) // num_sequences.to(tl.uint32)).to(tl.int32)
    sequence = place - block * num_sequences
    if LAST_FIRST:
        block = slots_each - 1 - block
    return head, sequence * slots_each + block


@triton.jit
def bounds(cu_seqlens, sequence, total):
    """Returns start and length of a sequence, clamped to the tensor."""
    start = tl.minimum(tl.maximum(tl.load(cu_seqlens + sequence).to(tl.int32), 0), total)
    end = tl.minimum(tl.load(cu_seqlens + sequence + 1).to(tl.int32), total)
    return start, tl.maximum(end - start, 0)


@triton.jit
def each_round(x, counter, H: tl.constexpr):
    """Returns x, in a form that the compiler cannot hoist out of a loop with a counter in [0, 2^30).

    The compiler does not know the range of the counter, so it computes everything that depends on the result in every
    iteration. For more than 64 dims, hoisted addresses would fill the registers and be spilled.
    """
    if H > 64:
        y = x + (counter >> 30)
    else:
        y = x
    return y


@triton.jit
def lengths(
    cu_q_ptr, cu_k_ptr, offset_ptr, sequence, num_tokens, num_keys_total, HAS_OFFSET: tl.constexpr
):  # fmt: skip
    """Returns start and length of a sequence's queries and of its keys, and the position of its first query."""
    q_start, q_len = bounds(cu_q_ptr, sequence, num_tokens)
    k_start, k_len = bounds(cu_k_ptr, sequence, num_keys_total)
    offset = 0
    if HAS_OFFSET:
        offset = tl.load(offset_ptr + sequence).to(tl.int32)
    return q_start, q_len, k_start, k_len, offset


@triton.jit
def visible(block, q_len, k_len, offset, ROWS: tl.constexpr, KEYS: tl.constexpr):
    """Returns how many keys each row of a block sees, the number of tiles that all rows see as a whole, and that of
    tiles that some row sees."""
    row = block * ROWS + tl.arange(0, ROWS)
    last_row = tl.minimum(block * ROWS + ROWS, q_len) - 1
    whole = tl.minimum(tl.maximum(offset + block * ROWS, 0), k_len) // KEYS
    seen = tl.cdiv(tl.minimum(tl.maximum(offset + last_row, 0), k_len), KEYS)
    return tl.minimum(offset + row, k_len), whole, seen


@triton.jit
def load_tiles(
    source, t, key, num_keys, dims, MASKED: tl.constexpr, KEYS: tl.constexpr, H: tl.constexpr, BH: tl.constexpr
):  # fmt: skip
    """Loads tile t of K and V [64, BH]: through TMA if `source` has descriptors (descriptors.py), otherwise from pointers.

    key: the numbers of the tile's keys, `tile.key_of_column()`. MASKED: keys from num_keys on are zeros.
    source: pointers, descriptors and strides of K and V, the sequence's first key, and the head.
    """
    k_ptr, v_ptr, k_descriptor, v_descriptor, sk_t, sk_n, sv_t, sv_n, k_start, kv_head = source
    first = k_start + t * KEYS
    if MASKED or k_descriptor is None:
        first64 = first.to(tl.int64)
        k_tile = k_ptr + (first64 * sk_t + kv_head * sk_n) + (key[:, None] * sk_t + dims[None, :])
        v_tile = v_ptr + (first64 * sv_t + kv_head * sv_n) + (key[:, None] * sv_t + dims[None, :])
        in_keys = t * KEYS + key < num_keys
        k = _load(k_tile, in_keys, dims, MASKED, H, BH)
        v = _load(v_tile, in_keys, dims, MASKED, H, BH)
    else:
        k = tl.reshape(k_descriptor.load([first, 0, 0, 0, kv_head * H]), (KEYS, H))
        v = tl.reshape(v_descriptor.load([first, 0, 0, 0, kv_head * H]), (KEYS, H))
    return k, v


@triton.jit
def _load(pointers, in_keys, dims, MASKED: tl.constexpr, H: tl.constexpr, BH: tl.constexpr):
    if MASKED:
        x = tl.load(pointers, mask=in_keys[:, None] & (dims < H)[None, :], other=0.0)
    elif H == BH:
        x = tl.load(pointers)
    else:
        x = tl.load(pointers, mask=(dims < H)[None, :], other=0.0)
    return x


@triton.jit
def first_granule(cu_q_ptr, sequence):
    return tl.load(cu_q_ptr + sequence).to(tl.int32) // STOP_ROWS + sequence


@triton.jit
def load_rows(ptr, token, token_stride, head, head_stride, row_ok, dims, H: tl.constexpr):
    """Returns the rows of tokens [ROWS] for `products`: [ROWS, BH], or pointers to float32 and which rows exist."""
    rows = ptr + token[:, None] * token_stride + head * head_stride
    if ptr.dtype.element_ty == tl.float32:
        x = (rows, row_ok)
    else:
        x = tl.load(rows + dims[None, :], mask=row_ok[:, None] & (dims < H)[None, :], other=0.0)
    return x


@triton.jit
def products(q, k, source, t, key, num_keys, KEYS: tl.constexpr, H: tl.constexpr, BH: tl.constexpr):
    """Returns q kᵀ [ROWS, KEYS] for tile t. In float32, forward and dq get the same bits.

    q: from `load_rows`; k and the other arguments: those of `load_tiles`.
    """
    k_ptr, _, _, _, sk_t, sk_n, _, _, k_start, kv_head = source
    if k_ptr.dtype.element_ty == tl.float32:
        rows = k_ptr + ((k_start + t * KEYS).to(tl.int64) * sk_t + kv_head * sk_n) + key[:, None] * sk_t
        z = tile.sliced_products(q, (rows, t * KEYS + key < num_keys), H, BH)
    else:
        z = tl.dot(q, tl.trans(k))
    return z


@triton.jit
def save_stop(
    block_stop_ptr, cu_q_ptr, sequence, head, block, q_len, num_stop_slots, stop, exact_from, ROWS: tl.constexpr
):  # fmt: skip
    GRANULES: tl.constexpr = ROWS // STOP_ROWS
    granule = block * GRANULES + tl.arange(0, GRANULES)
    # One store of 64 bits: with two, forward over 80 dims of float32 would spill.
    pairs = block_stop_ptr.to(tl.pointer_type(tl.int64), bitcast=True)
    pointers = pairs + head * num_stop_slots + first_granule(cu_q_ptr, sequence) + granule
    pair = ((tl.full([], 0, tl.int64) + exact_from) << 32) + stop
    tl.store(pointers, tl.full([GRANULES], 0, tl.int64) + pair, mask=granule * STOP_ROWS < q_len)


@triton.jit
def load_stop(block_stop_ptr, cu_q_ptr, sequence, head, block, q_len, num_stop_slots, ROWS: tl.constexpr):
    """Returns the farthest tile that forward visited for row blocks, and from which tile on they need the exact algebra.

    `block` may be a vector. Blocks after the sequence's end have stopped at NEVER.
    """
    GRANULES: tl.constexpr = ROWS // STOP_ROWS
    granule = block * GRANULES
    if GRANULES == 1:
        pointers = block_stop_ptr + 2 * (head * num_stop_slots + first_granule(cu_q_ptr, sequence) + granule)
        stop = tl.load(pointers, mask=granule * STOP_ROWS < q_len, other=NEVER)
        exact_from = tl.load(pointers + 1, mask=granule * STOP_ROWS < q_len, other=NEVER)
    else:
        # Loads of 64 bits: with 32, dkv over 80 dims would spill.
        pairs = block_stop_ptr.to(tl.pointer_type(tl.int64), bitcast=True)
        pairs = pairs + head * num_stop_slots + first_granule(cu_q_ptr, sequence)
        pair = tl.load(pairs + granule, mask=granule * STOP_ROWS < q_len, other=(1 << 62) + (1 << 30))
        stop, exact_from = pair.to(tl.int32), (pair >> 32).to(tl.int32)
        for i in tl.static_range(1, GRANULES):
            more = tl.load(pairs + granule + i, mask=(granule + i) * STOP_ROWS < q_len, other=(1 << 62) + (1 << 30))
            stop, exact_from = tl.minimum(stop, more.to(tl.int32)), tl.minimum(exact_from, (more >> 32).to(tl.int32))
    return stop, exact_from


@triton.jit
def _algebras(stops, head, block, t, q_len, num_stop_slots, ROWS: tl.constexpr):
    """Returns which blocks take the fast algebra at tile t, and which take the exact one."""
    stop, exact_from = load_stop(stops[0], stops[1], stops[2], head, block, q_len, num_stop_slots, ROWS)
    return (stop <= t) & (t < exact_from), (stop <= t) & (t >= exact_from)


@triton.jit
def list_runs(
    list_ptr, stops, first_head, base, first, last, t, q_len, num_stop_slots,
    ROWS: tl.constexpr, KV_GROUP: tl.constexpr, MAX_BLOCKS: tl.constexpr,
):  # fmt: skip
    """Writes the runs of row blocks in [first, last) for which tile t is live and the fast algebra holds.

    Runs are listed head by head. A run is stored as its first and its last block, each as
    (head of the group · MAX_BLOCKS + block − base). Returns the number of runs, and which live blocks take the exact
    algebra: 0 if none, 1 if only some of the first NEAR do, otherwise more. stops: block_stop_ptr, cu_q_ptr and the sequence.
    """
    count = 0
    exact = 0
    for i in range(KV_GROUP):
        for start in range(first, last, 64):
            block = start + tl.arange(0, 64)
            inside = block < last
            here = _algebras(stops, first_head + i, block, t, q_len, num_stop_slots, ROWS)
            before = _algebras(stops, first_head + i, tl.maximum(block - 1, first), t, q_len, num_stop_slots, ROWS)[0]
            after = _algebras(stops, first_head + i, block + 1, t, q_len, num_stop_slots, ROWS)[0]
            live = here[0] & inside
            opens = live & ((block == first) | (before == 0))
            closes = live & ((block + 1 >= last) | (after == 0))
            run = 2 * (count + tl.cumsum(opens.to(tl.int32), 0) - 1)
            entry = i * MAX_BLOCKS + block - base
            tl.store(list_ptr + run, entry, mask=opens)
            tl.store(list_ptr + run + 1, entry, mask=closes)
            count += tl.sum(opens.to(tl.int32), 0)
            exact |= tl.max(tl.where(here[1] & inside, tl.where(block < first + NEAR, 1, 2), 0), 0)
    return count, exact


@triton.jit
def _union(bits, count, last, other_bits, other_count, other_last):
    return bits | other_bits, count + other_count, tl.maximum(last, other_last)


@triton.jit
def live_blocks(stops, head, start, end, t, q_len, num_stop_slots, EXACT: tl.constexpr, ROWS: tl.constexpr):
    """Returns which of the WORD row blocks from `start` on take the fast (or exact) algebra at tile t, as bits, how many they
    are, and the number after the last one that takes the exact algebra (0 if none does).

    stops: block_stop_ptr, cu_q_ptr and the sequence.
    """
    place = tl.arange(0, WORD)
    block = start + place
    stop, exact_from = load_stop(*stops, head, block, q_len, num_stop_slots, ROWS)
    live = (stop <= t) & (block < end)
    exact = live & (t >= exact_from)
    found = exact if EXACT else live & (t < exact_from)
    bits = found.to(tl.int64) << place
    return tl.reduce((bits, found.to(tl.int32), tl.where(exact, block + 1, 0)), 0, _union)


@triton.jit
def lowest(bits):
    """Returns the number of the lowest bit of a scalar that is set."""
    # A power of two is exact in float32.
    return ((bits & -bits).to(tl.float32).to(tl.int32, bitcast=True) >> 23 & 255) - 127
