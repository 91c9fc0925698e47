"""The place of a program, for all kernels, and the algebra of a tile in groups of four keys, for float32 and decoding.

Logits are in units of log2 e, so that β = u / (1 + u) with u = 2^z. "Spent" is −log2 of the share of the stick that a
key leaves. The columns of a tile are stored as [first of each group | second | third | fourth]: column c holds the key
4 (c mod BN/4) + c div BN/4. So a group of four adjacent keys can be taken apart without moving data between threads.
Each group needs only one logarithm and one exponential; within it, everything is products.
"""

import triton
import triton.language as tl

GROUP = tl.constexpr(4)
# In float32, 2^25 + 1 rounds to 2^25. So log2(1 + 2^z) = z above this cap, and a product of four stays finite.
LOGIT_CAP = tl.constexpr(25.0)
# Weights below 2^-150 are zero in float32 for every logit.
DEAD = tl.constexpr(-150.0)
NEVER = tl.constexpr(1 << 30)
LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
# Rows per granule, the unit in which forward reports where it stopped.
STOP_ROWS = tl.constexpr(64)
INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))


@triton.jit
def log2(x):
    # tl.log2 compiles to a polynomial of a dozen instructions.
    if INTERPRETED:
        y = tl.log2(x)
    else:
        y = tl.inline_asm_elementwise("lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
    return y


@triton.jit
def reciprocal(x):
    if INTERPRETED:
        y = 1.0 / x
    else:
        y = tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
    return y


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
def assign(program, num_heads, head_group, num_slots):
    """Returns the head and place of a program, slot by slot for `head_group` heads, then for the next ones."""
    first = program // (head_group * num_slots) * head_group
    inside = program - first * num_slots
    width = tl.minimum(head_group, num_heads - first)
    return first + inside % width, inside // width


@triton.jit
def slot_at(place, num_slots, num_sequences, LAST_FIRST: tl.constexpr):
    """Returns the slot at a place. For equally long sequences, the last (or first) blocks of all come first."""
    blocks = tl.cdiv(num_slots, num_sequences)
    block = place // num_sequences
    if LAST_FIRST:
        block = blocks - 1 - block
    return (place % num_sequences) * blocks + block


@triton.jit
def bounds(cu_seqlens, sequence, total):
    """Returns start and length of a sequence, clamped to the tensor."""
    start = tl.minimum(tl.maximum(tl.load(cu_seqlens + sequence).to(tl.int32), 0), total)
    end = tl.minimum(tl.load(cu_seqlens + sequence + 1).to(tl.int32), total)
    return start, tl.maximum(end - start, 0)


@triton.jit
def block_stop(block_stop_ptr, cu_q_ptr, sequence, head, block, q_len, num_stop_slots, ROWS: tl.constexpr):
    """Returns the farthest tile that forward visited for any granule of these row blocks. `block` may be a vector."""
    base = block_stop_ptr + head * num_stop_slots + tl.load(cu_q_ptr + sequence).to(tl.int32) // STOP_ROWS + sequence
    if ROWS < STOP_ROWS:
        first = block // (STOP_ROWS // ROWS)
    else:
        first = block * (ROWS // STOP_ROWS)
    stop = tl.load(base + first, mask=first * STOP_ROWS < q_len, other=NEVER)
    for i in tl.static_range(1, ROWS // STOP_ROWS):
        more = tl.load(base + first + i, mask=(first + i) * STOP_ROWS < q_len, other=NEVER)
        stop = tl.minimum(stop, more)
    return stop


@triton.jit
def list_runs(
    list_ptr, block_stop_ptr, cu_q_ptr, sequence, first_head, base, first, last, t, q_len, num_stop_slots,
    ROWS: tl.constexpr, KV_GROUP: tl.constexpr, MAX_BLOCKS: tl.constexpr,
):  # fmt: skip
    """Writes the runs of row blocks in [first, last) for which tile t is live. Returns the number of runs.

    Runs are listed head by head. A run is stored as its first and its last block, each as
    (head of the group · MAX_BLOCKS + block − base).
    """
    count = 0
    for i in range(KV_GROUP):
        for start in range(first, last, 64):
            block = start + tl.arange(0, 64)
            stops = (block_stop_ptr, cu_q_ptr, sequence, first_head + i)
            live = (block < last) & (block_stop(*stops, block, q_len, num_stop_slots, ROWS) <= t)
            earlier = block_stop(*stops, tl.maximum(block - 1, first), q_len, num_stop_slots, ROWS)
            later = block_stop(*stops, block + 1, q_len, num_stop_slots, ROWS)
            opens = live & ((block == first) | (earlier > t))
            closes = live & ((block + 1 >= last) | (later > t))
            run = 2 * (count + tl.cumsum(opens.to(tl.int32), 0) - 1)
            entry = i * MAX_BLOCKS + block - base
            tl.store(list_ptr + run, entry, mask=opens)
            tl.store(list_ptr + run + 1, entry, mask=closes)
            count += tl.sum(opens.to(tl.int32), 0)
    return count


@triton.jit
def key_of_column(BN: tl.constexpr):
    column = tl.arange(0, BN)
    return column % (BN // GROUP) * GROUP + column // (BN // GROUP)


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
def triangle(BN: tl.constexpr, NEARER: tl.constexpr, PARTS: tl.constexpr, dtype: tl.constexpr):
    """Returns a matrix such that x @ triangle sums all groups strictly nearer to (or farther from) the query.

    The matrix is repeated PARTS times, for an x that is split into as many rounded parts.
    """
    row = (tl.arange(0, PARTS * (BN // GROUP)) % (BN // GROUP))[:, None]
    column = tl.arange(0, BN // GROUP)[None, :]
    if NEARER:
        ones = row > column
    else:
        ones = row < column
    return ones.to(dtype)


@triton.jit
def group_sums(x, triangle, PRECISION: tl.constexpr):
    """Returns x @ triangle. x is split into as many parts of the triangle's dtype as the triangle has copies."""
    # Triton resolves constant conditions only in if and else; the code after an early return would be compiled as well.
    if triangle.shape[0] == x.shape[1]:
        parts = x.to(triangle.dtype)
    else:
        high = x.to(triangle.dtype)
        parts = beside(high, (x - high.to(tl.float32)).to(triangle.dtype), x.shape[0], 2 * x.shape[1])
    return tl.dot(parts, triangle, input_precision=PRECISION)


@triton.jit
def halves(x, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    return tl.split(tl.permute(tl.reshape(x, (ROWS, 2, COLUMNS // 2)), (0, 2, 1)))


@triton.jit
def quarters(x, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    left, right = halves(x, ROWS, COLUMNS)
    a, b = halves(left, ROWS, COLUMNS // 2)
    c, d = halves(right, ROWS, COLUMNS // 2)
    return a, b, c, d


@triton.jit
def beside(a, b, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    return tl.reshape(tl.permute(tl.join(a, b), (0, 2, 1)), (ROWS, COLUMNS))


@triton.jit
def whole(a, b, c, d, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    return beside(beside(a, b, ROWS, COLUMNS // 2), beside(c, d, ROWS, COLUMNS // 2), ROWS, COLUMNS)


@triton.jit
def multiply(x, y, acc, TURN: tl.constexpr, PARTS: tl.constexpr, PRECISION: tl.constexpr):
    """Returns acc + x y (TURN: acc + xᵀ y). x, float32, is multiplied in y's dtype; two parts keep twice the digits."""
    high = x.to(y.dtype)
    acc = tl.dot(tl.trans(high) if TURN else high, y, acc, input_precision=PRECISION)
    if PARTS == 2:
        low = (x - high.to(tl.float32)).to(y.dtype)
        acc = tl.dot(tl.trans(low) if TURN else low, y, acc, input_precision=PRECISION)
    return acc


@triton.jit
def spend(z, limit, MASKED: tl.constexpr, ROWS: tl.constexpr, BN: tl.constexpr):
    """Returns u of the four keys of each group, w = Π(1 + u) − 1, and log2(1 + w) with capped and with uncapped logits.

    z: logits [ROWS, BN]. MASKED: row i attends only to the first limit[i] keys of the tile.
    """
    z0, z1, z2, z3 = quarters(z, ROWS, BN)
    if MASKED:
        # In quarters, a thread holds only a fourth of the key numbers in registers.
        key = (tl.arange(0, BN // GROUP) * GROUP)[None, :]
        z0 = tl.where(key < limit[:, None], z0, float("-inf"))
        z1 = tl.where(key < limit[:, None] - 1, z1, float("-inf"))
        z2 = tl.where(key < limit[:, None] - 2, z2, float("-inf"))
        z3 = tl.where(key < limit[:, None] - 3, z3, float("-inf"))
    u0 = tl.exp2(tl.minimum(z0, LOGIT_CAP))
    u1 = tl.exp2(tl.minimum(z1, LOGIT_CAP))
    u2 = tl.exp2(tl.minimum(z2, LOGIT_CAP))
    u3 = tl.exp2(tl.minimum(z3, LOGIT_CAP))
    w01 = u0 * u1 + (u0 + u1)
    w23 = u2 * u3 + (u2 + u3)
    w = w01 * w23 + (w01 + w23)
    # 1 + w loses values below 2^-24. Many keys with low logits would add up to a visible share of the stick.
    series = w * (LOG2_E - w * (LOG2_E / 2 - w * (LOG2_E / 3)))
    capped = tl.where(w < 2**-8, series, log2(1.0 + w))
    over = (tl.maximum(z0, LOGIT_CAP) + tl.maximum(z1, LOGIT_CAP)) + (
        tl.maximum(z2, LOGIT_CAP) + tl.maximum(z3, LOGIT_CAP)
    )
    return u0, u1, u2, u3, w, capped, capped + (over - 4 * LOGIT_CAP)


@triton.jit
def spent_nearer(spent, nearer, PRECISION: tl.constexpr):
    """Returns −log2 of what the nearer groups of this tile leave. The range of fp16 ends at 65504."""
    return group_sums(tl.minimum(spent, 60000.0), nearer, PRECISION)


@triton.jit
def weigh(u0, u1, u2, u3, rest):
    """Returns the weights of a group's keys, the farthest first. rest: log2 of the stick left after the group."""
    p = tl.exp2(rest)
    a0 = u0 * p
    p += a0
    a1 = u1 * p
    p += a1
    a2 = u2 * p
    p += a2
    return a0, a1, a2, u3 * p


@triton.jit
def logit_gradients(u0, u1, u2, u3, w, g0, g1, g2, g3, behind):
    """Returns dz_i = g_i − β_i Σ_{i' ≤ i} g_i'. behind: Σ over farther groups. One reciprocal gives all 1 / (1 + u)."""
    y0 = 1.0 + u0
    y1 = 1.0 + u1
    y2 = 1.0 + u2
    y3 = 1.0 + u3
    y01 = y0 * y1
    y23 = y2 * y3
    r = reciprocal(y01 * y23)
    r01 = r * y23
    r23 = r * y01
    s = behind + g0
    dz0 = g0 - u0 * (r01 * y1) * s
    s += g1
    dz1 = g1 - u1 * (r01 * y0) * s
    s += g2
    dz2 = g2 - u2 * (r23 * y3) * s
    s += g3
    return dz0, dz1, dz2, g3 - u3 * (r23 * y2) * s
