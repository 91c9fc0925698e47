"""What the forward, backward and decode kernels share: where a program works, and the algebra of one tile.

Logits are in units of log2 e, so that β = u / (1 + u) with u = 2^z, and "spent" is −log2 of the stick that a key leaves.
A tile's columns are stored as [first of each group | second | third | fourth]: column c holds key 4 (c mod BN/4) + c div BN/4,
so that taking groups of four adjacent keys apart moves no data between threads. Only one logarithm and one exponential are
then taken a group; inside it everything is products.
"""

import triton
import triton.language as tl

GROUP = tl.constexpr(4)
# 2^25 + 1 rounds to 2^25 in float32: log2(1 + 2^z) = z above, and the product of four stays finite.
LOGIT_CAP = tl.constexpr(25.0)
# Weights under 2^-150 are zero in float32 whatever the logit.
DEAD = tl.constexpr(-150.0)
NEVER = tl.constexpr(1 << 30)
LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
# Rows of the finest granule in which forward reports where it stopped.
STOP_ROWS = tl.constexpr(64)
INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))


@triton.jit
def log2(x):
    # tl.log2 is a polynomial of a dozen instructions.
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
    """Which sequence and which block of it slot `slot` is.

    Sequence i owns the slots from cu_seqlens[i] // ROWS + i on: enough for its blocks wherever it starts, at one spare slot a
    sequence, and found without a table."""
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
    """Head and place in the order of slots of a program: slot by slot for the first `head_group` heads, then for the next.

    Heads end at very different lengths; side by side, the short ones fill the time of the long. A group is no larger than the
    L2 cache can serve."""
    first = program // (head_group * num_slots) * head_group
    inside = program - first * num_slots
    width = tl.minimum(head_group, num_heads - first)
    return first + inside % width, inside // width


@triton.jit
def slot_at(place, num_slots, num_sequences, LAST_FIRST: tl.constexpr):
    """A permutation of the slots that takes every sequence's last (or first) block before any other's second, if the sequences
    are equally long: the blocks with most to do start first."""
    blocks = tl.cdiv(num_slots, num_sequences)
    block = place // num_sequences
    if LAST_FIRST:
        block = blocks - 1 - block
    return (place % num_sequences) * blocks + block


@triton.jit
def bounds(cu_seqlens, sequence, total):
    """Start and length of a sequence, clamped so that no boundary leads out of the tensor."""
    start = tl.minimum(tl.maximum(tl.load(cu_seqlens + sequence).to(tl.int32), 0), total)
    end = tl.minimum(tl.load(cu_seqlens + sequence + 1).to(tl.int32), total)
    return start, tl.maximum(end - start, 0)


@triton.jit
def block_stop(block_stop_ptr, cu_q_ptr, sequence, head, block, q_len, num_stop_slots, ROWS: tl.constexpr):
    """The farthest tile that forward visited for any granule of these row blocks. `block` may be a vector."""
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
    """Writes the runs of row blocks in [first, last) that tile t is alive for, head by head, as their first and last
    (head of the group · MAX_BLOCKS + block − base), and returns how many runs there are."""
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
    """x, for a loop's counter in [0, 2^30). No compiler knows that range, so what is computed from this is computed in every
    round: over 64 dims, addresses that were hoisted out of the loop would fill the registers, and be spilled."""
    if H > 64:
        y = x + (counter >> 30)
    else:
        y = x
    return y


@triton.jit
def triangle(BN: tl.constexpr, NEARER: tl.constexpr, PARTS: tl.constexpr, dtype: tl.constexpr):
    """x @ triangle sums, for every group, the groups strictly nearer to the query (or strictly farther from it).

    PARTS copies lie one under the other, for an x that is split into as many rounded parts."""
    row = (tl.arange(0, PARTS * (BN // GROUP)) % (BN // GROUP))[:, None]
    column = tl.arange(0, BN // GROUP)[None, :]
    if NEARER:
        ones = row > column
    else:
        ones = row < column
    return ones.to(dtype)


@triton.jit
def group_sums(x, triangle, PRECISION: tl.constexpr):
    """x @ triangle, with x in as many parts of the triangle's type as the triangle has copies."""
    # Triton resolves a constant condition only in if and else: an early return would be compiled as well.
    if triangle.shape[0] == x.shape[1]:
        parts = x.to(triangle.dtype)
    elif triangle.dtype == tl.bfloat16:
        # Cutting the bits off is exact and cheap; rounding and converting back runs at an eighth of the rate.
        high = (x.to(tl.int32, bitcast=True) & -65536).to(tl.float32, bitcast=True)
        parts = beside(high, x - high, x.shape[0], 2 * x.shape[1]).to(triangle.dtype)
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
    """acc + x y (TURN: xᵀ y). x, float32, goes to the tensor cores in y's type: in one part, or in two for twice its digits."""
    high = x.to(y.dtype)
    acc = tl.dot(tl.trans(high) if TURN else high, y, acc, input_precision=PRECISION)
    if PARTS == 2:
        low = (x - high.to(tl.float32)).to(y.dtype)
        acc = tl.dot(tl.trans(low) if TURN else low, y, acc, input_precision=PRECISION)
    return acc


@triton.jit
def spend(z, limit, MASKED: tl.constexpr, ROWS: tl.constexpr, BN: tl.constexpr):
    """Logits [ROWS, BN] → u of the four keys of each group, w = Π(1 + u) − 1, log2(1 + w) with capped logits, and uncapped.

    MASKED: row i attends to the tile's first limit[i] keys alone."""
    z0, z1, z2, z3 = quarters(z, ROWS, BN)
    if MASKED:
        # By quarters, a thread keeps a fourth of the key numbers in registers.
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
    # 1 + w drops what is under 2^-24, and many keys of low logits would add up to a visible part of the stick.
    series = w * (LOG2_E - w * (LOG2_E / 2 - w * (LOG2_E / 3)))
    capped = tl.where(w < 2**-8, series, log2(1.0 + w))
    over = (tl.maximum(z0, LOGIT_CAP) + tl.maximum(z1, LOGIT_CAP)) + (
        tl.maximum(z2, LOGIT_CAP) + tl.maximum(z3, LOGIT_CAP)
    )
    return u0, u1, u2, u3, w, capped, capped + (over - 4 * LOGIT_CAP)


@triton.jit
def spent_nearer(spent, nearer, PRECISION: tl.constexpr):
    """−log2 of what the groups of this tile that are nearer leave. The range of fp16 ends at 65504."""
    return group_sums(tl.minimum(spent, 60000.0), nearer, PRECISION)


@triton.jit
def weigh(u0, u1, u2, u3, rest):
    """Weights of a group's four keys, the first the farthest, from rest = log2 of the stick behind the whole group."""
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
    """dz_i = g_i − β_i Σ_{i' ≤ i} g_i', from the sum behind the group. One reciprocal gives the four 1 / (1 + u)."""
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
