# ruff: noqa: RUF005 (Triton compiles no starred tuples)
# mypy: disable-error-code=assignment
"""The algebra of one tile of 64 keys, in which each thread holds 16 adjacent keys of a row.

Logits are in units of log2 e, so that β = u / (1 + u) with u = 2^z. "Spent" is −log2 of the share of the stick that keys
leave. Column 8j + 2c + e of a tile holds key 16c + 2j + e: on the tensor cores' accumulator, lane c of the four lanes
that share a row then owns the keys 16c … 16c + 15. A tile [ROWS, 64] is taken apart into 16 tensors [ROWS, 4], the
farthest key first, which moves nothing between threads. What all lanes of a row know is stored as [ROWS, 4] too.

For keys far to near, t_k = u_k Π_{i<k} (1 + u_i) and w = Π (1 + u_i) − 1 follow from each other without cancellation.
The weight of a key is t_k 2^(log2 of the stick left after its chain of keys), and β_k = t_k / Π_{i≤k} (1 + u_i).
A chain must not leave float32's range. So there are two versions of the algebra. The fast one has chains of 8 keys and
one logarithm per thread and row, and holds while 16 keys spend at most RANGE. The exact one (EXACT) has chains of 4
keys, a logarithm for each, and logits capped at 25 bits. It holds for all logits, and it is the one that masks keys.
"""

import triton
import triton.language as tl

# In float32, 2^25 + 1 rounds to 2^25. So log2(1 + 2^z) = z above this cap, and a product of four stays finite.
LOGIT_CAP = tl.constexpr(25.0)
# Weights below 2^-150 are zero in float32 for every logit.
DEAD = tl.constexpr(-150.0)
LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))
# Bits that 16 adjacent keys of a row may spend in the fast algebra. Weights and their factors stay above 2^-126 where
# the nearer keys leave 2^-56 of the stick or more; where sticks below 2^-12 may be skipped, 2^-16 is enough.
RANGE = tl.constexpr(70.0)
RANGE_SKIPPING = tl.constexpr(110.0)
# Phase two divides Σ g by the stick, which it counts as at least 2^-40 (smaller weights are zeros in fp16) or, where sticks may
# be skipped, 2^-16. So quotients stay below 2^(RANGE + 40) or 2^(RANGE_SKIPPING + 16), and finite (README.md, Range).
LEAST = tl.constexpr(-40.0)
LEAST_SKIPPING = tl.constexpr(-16.0)
LARGEST_SKIPPED = 2.0**-12


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
def exp2(x):
    # tl.exp2 takes three more instructions for denormal results.
    if INTERPRETED:
        y = tl.exp2(x)
    else:
        y = tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)
    return y


@triton.jit
def log2_1p(w):
    """Returns log2(1 + w). 1 + w loses values below 2^-24, and many low logits add up to a visible share of the stick."""
    series = w * (LOG2_E - w * (LOG2_E / 2 - w * (LOG2_E / 3)))
    return tl.where(w < 2**-8, series, log2(1.0 + w))


@triton.jit
def key_of_column(KEYS: tl.constexpr):
    column = tl.arange(0, KEYS)
    return column % 8 // 2 * (KEYS // 4) + column // 8 * 2 + column % 2


@triton.jit
def take_apart(x, ROWS: tl.constexpr):
    """Returns the 16 or 8 keys of each thread, the farthest first, as tensors [ROWS, 4]."""
    # The bits of a column are j2 j1 j0 c1 c0 e, and those of a key c1 c0 j2 j1 j0 e. With 32 keys, there is no j2.
    if x.shape[1] == 64:
        keys = (tl.permute(tl.reshape(x, (ROWS, 2, 2, 2, 4, 2)), (0, 4, 5, 3, 2, 1)),)
    else:
        keys = (tl.permute(tl.reshape(x, (ROWS, 2, 2, 4, 2)), (0, 3, 4, 2, 1)),)
    for level in tl.static_range(4 if x.shape[1] == 64 else 3):
        split = ()
        for i in tl.static_range(2**level):
            split = split + tl.split(keys[i])
        keys = split
    return keys


@triton.jit
def put_together(keys, ROWS: tl.constexpr):
    """Returns the tile [ROWS, 64 or 32] that `take_apart` takes apart into `keys`."""
    LEVELS: tl.constexpr = 4 if len(keys) == 16 else 3
    for level in tl.static_range(LEVELS):
        joined = ()
        for i in tl.static_range(2 ** (LEVELS - 1 - level)):
            joined = joined + (tl.join(keys[2 * i], keys[2 * i + 1]),)
        keys = joined
    if LEVELS == 4:
        x = tl.reshape(tl.permute(keys[0], (0, 5, 4, 3, 1, 2)), (ROWS, 64))
    else:
        x = tl.reshape(tl.permute(keys[0], (0, 4, 3, 1, 2)), (ROWS, 32))
    return x


@triton.jit
def lanes(like):
    return tl.broadcast_to(tl.arange(0, 4)[None, :], like.shape)


@triton.jit
def per_row(x):
    """Returns x [ROWS] for all lanes: [ROWS, 4]."""
    return tl.broadcast_to(x[:, None], (x.shape[0], 4))


@triton.jit
def exchange(x, BIT: tl.constexpr):
    """Returns x of the lane whose number differs in BIT, 1 or 2."""
    if INTERPRETED:
        y = tl.gather(x, lanes(x) ^ BIT, 1)
    elif BIT == 1:
        y = tl.inline_asm_elementwise(
            "shfl.sync.bfly.b32 $0, $1, 1, 0x1f, 0xffffffff;", "=f,f", [x], dtype=tl.float32, is_pure=False, pack=1
        )
    else:
        y = tl.inline_asm_elementwise(
            "shfl.sync.bfly.b32 $0, $1, 2, 0x1f, 0xffffffff;", "=f,f", [x], dtype=tl.float32, is_pure=False, pack=1
        )
    return y


@triton.jit
def store_in_place(pointers, x):
    """Stores x from the threads that hold it, all of it.

    tl.store would first move x through shared memory, with a barrier, so that a thread stores more at once.
    """
    if INTERPRETED:
        tl.store(pointers, x)
    else:
        tl.inline_asm_elementwise(
            "st.global.f32 [$1], $2; mov.b32 $0, 0;", "=r,l,f", [pointers.to(tl.int64), x], dtype=tl.int32,
            is_pure=False, pack=1,
        )  # fmt: skip


@triton.jit
def lane_sums(x, NEARER: tl.constexpr):
    """Returns the sum of x over the lanes with nearer (or farther) keys, and over all four. x must be finite."""
    neighbour = exchange(x, 1)
    pair = x + neighbour
    other_pair = exchange(pair, 2)
    lane = lanes(x)
    # Loops keep these in registers, so that both directions share them.
    neighbour_is_nearer = (lane % 2 == 0).to(tl.float32)
    pair_is_nearer = (lane < 2).to(tl.float32)
    if NEARER:
        beside = neighbour_is_nearer * neighbour + pair_is_nearer * other_pair
    else:
        beside = (neighbour - neighbour_is_nearer * neighbour) + (other_pair - pair_is_nearer * other_pair)
    return beside, pair + other_pair


@triton.jit
def chain(u, FIRST: tl.constexpr, COUNT: tl.constexpr):
    """Returns t of COUNT keys from FIRST on, and w = Π(1 + u) − 1."""
    w = u[FIRST]
    t = (w,)
    for i in tl.static_range(FIRST + 1, FIRST + COUNT):
        next_t = u[i] * w + u[i]
        t = t + (next_t,)
        w = w + next_t
    return t, w


@triton.jit
def spend(products, scale, limit, MASKED: tl.constexpr, EXACT: tl.constexpr, ROWS: tl.constexpr):
    """Returns u and t of each key, w of each chain, `after`, and what the 16 keys spend.

    products · scale: logits [ROWS, 64]; scale is one number per row [ROWS, 4], or 1 (`scale_live`).
    MASKED: row i attends only to the first limit[i] keys of the tile. after[n]: log2 of what chain n
    and the nearer chains of the thread spend. It holds one number for all of a thread's chains in the fast algebra.
    """
    parts = take_apart(products, ROWS)
    z = ()
    for i in tl.static_range(len(parts)):
        z = z + (parts[i] * scale,)
    if MASKED:
        z = _mask(z, limit)
    if EXACT:
        u, t, w, after, spent = _spend_capped(z)
    else:
        u = ()
        for i in tl.static_range(len(z)):
            u = u + (exp2(z[i]),)
        t, w0 = chain(u, 0, 8)
        if len(z) == 16:
            t1, w1 = chain(u, 8, 8)
            t = t + t1
            w = (w0, w1)
            spent = log2_1p((w1 * w0 + w1) + w0)
        else:
            w = (w0,)
            spent = log2_1p(w0)
        after = (spent,)
    return u, t, w, after, spent


@triton.jit
def scale_live(products, live, scale, SKIPS: tl.constexpr):
    """Returns products and the scale that `spend` multiplies them by: with skipping, 0 for rows that are no longer live.

    Their weights are zero, whatever the logits are. With 0, their 16 keys spend 16 bits, so that they never leave the range.
    Without skipping, the gradient of log_rest needs the logits, and products are multiplied here.
    """
    if SKIPS:
        left = tl.where(live, scale, 0.0)
    else:
        products = products * scale
        left = 1.0
    return products, left


@triton.jit
def _mask(z, limit):
    # The numbers of a thread's keys are 16c + i. Comparing i with limit − 16c keeps one number in registers, not 16.
    own = per_row(limit) - len(z) * lanes(z[0])
    masked = ()
    for i in tl.static_range(len(z)):
        masked = masked + (tl.where(own > i, z[i], float("-inf")),)
    return masked


@triton.jit
def _spend_capped(z):
    u = ()
    t = ()
    w = ()
    after = ()
    spent = tl.zeros_like(z[0])
    for n in tl.static_range(len(z) // 4 - 1, -1, -1):
        un = ()
        excess = ()
        for i in tl.static_range(4 * n, 4 * n + 4):
            un = un + (exp2(tl.minimum(z[i], LOGIT_CAP)),)
            excess = excess + (tl.maximum(z[i], LOGIT_CAP) - LOGIT_CAP,)
        tn, wn = chain(un, 0, 4)
        capped = log2_1p(wn)
        # β of a capped key is 1 in float32, so that its own weight does not depend on the excess.
        after = (spent + capped,) + after
        spent += capped + ((excess[0] + excess[1]) + (excess[2] + excess[3]))
        u = un + u
        t = tn + t
        w = (wn,) + w
    return u, t, w, after, spent


@triton.jit
def factors(w, after, rest, scale, EXACT: tl.constexpr, WIDE: tl.constexpr):
    """Returns p of each chain: its weights are t p. rest [ROWS, 4]: log2 of the stick left after the nearer lanes.

    scale: a power of two by which p is multiplied, or None. Added to `rest`, it would change how `rest` is rounded.
    WIDE: the results are float32. If a chain spends 64 bits, its logarithm is off by 2^-16 on a GPU, and so would be the weight
    of its nearest key. Division is off by 2^-23.
    """
    p = ()
    if WIDE:
        chains = w if EXACT or len(w) == 1 else ((w[1] * w[0] + w[1]) + w[0],)
        for n in tl.static_range(len(after)):
            nearer = after[n] - log2_1p(chains[n]) if EXACT else 0.0
            p = p + (exp2(rest - nearer) * reciprocal(1.0 + chains[n]),)
    else:
        for n in tl.static_range(len(after)):
            p = p + (exp2(rest - after[n]),)
    if scale is not None:
        scaled = ()
        for n in tl.static_range(len(after)):
            scaled = scaled + (p[n] * scale,)
        p = scaled
    if not EXACT and len(w) == 2:
        p = (p[0], p[0] * w[0] + p[0])  # type: ignore[misc]
    return p


@triton.jit
def weigh(t, p, EXACT: tl.constexpr):
    """Returns the weights of the 16 keys. p: `factors`."""
    LENGTH: tl.constexpr = 4 if EXACT else 8
    a = ()
    for i in tl.static_range(len(t)):
        a = a + (t[i] * p[i // LENGTH],)
    return a


@triton.jit
def logit_gradients(u, t, w, p, d, farther, EXACT: tl.constexpr):
    """Returns dz of the 16 keys, and Σ g over the tile, where g_k = t_k p d_k.

    dz_k = g_k − β_k Σ_{i≤k} g_i = t_k (p d_k − r_k Σ_{i≤k} g_i), with r_k = 1 / Π_{i≤k} (1 + u_i) within the chain. So
    neither weights nor β are needed. d: dO·v. farther [ROWS, 4]: Σ g over the keys of farther tiles.
    """
    LENGTH: tl.constexpr = 4 if EXACT else 8
    LAST: tl.constexpr = len(w) - 1
    r = _shares(u, reciprocal(1.0 + w[LAST]), LENGTH * LAST, LENGTH)
    for n in tl.static_range(LAST - 1, -1, -1):
        r = _shares(u, reciprocal(1.0 + w[n]), LENGTH * n, LENGTH) + r
    gain = p[0] * d[0]
    total = t[0] * gain
    x = (gain - r[0] * total,)
    for i in tl.static_range(1, len(t)):
        gain = p[i // LENGTH] * d[i]
        total = t[i] * gain + total
        x = x + (gain - r[i] * total,)
    lanes_farther, tile_total = lane_sums(total, False)
    farther += lanes_farther
    dz = ()
    for i in tl.static_range(len(t)):
        dz = dz + (t[i] * (x[i] - r[i] * farther),)
    return dz, tile_total


@triton.jit
def logit_gradients_of_weights(u, w, a, rest, d, farther, APART: tl.constexpr):
    """Returns dz of the 16 keys from their weights a, in the fast algebra.

    With Q_k, the stick that is left when key k is reached, a_k = β_k Q_k. So dz_k = a_k (d_k − Σ_{i≤k} g_i / Q_k). This
    takes one instruction per key less than `logit_gradients` if the weights are needed anyway, and t can leave the
    registers. rest [ROWS, 4]: log2 of Q of the nearest key, at least LEAST.
    APART: takes β = a_k / Q_k, which is finite, times `farther`: their quotient need not be if log_rest has a gradient.
    """
    nearest = exp2(-rest)
    inverse = _shares(u, w[1] * nearest + nearest, 0, 8) + _shares(u, nearest, 8, 8)
    total = a[0] * d[0]
    x = (d[0] - inverse[0] * total,)
    for i in tl.static_range(1, 16):
        total = a[i] * d[i] + total
        x = x + (d[i] - inverse[i] * total,)
    lanes_farther, _ = lane_sums(total, False)
    farther += lanes_farther
    dz = ()
    for i in tl.static_range(16):
        dz = dz + (a[i] * x[i] - (a[i] * inverse[i]) * farther if APART else a[i] * (x[i] - inverse[i] * farther),)
    return dz


@triton.jit
def _shares(u, last, FIRST: tl.constexpr, COUNT: tl.constexpr):
    """Returns r of COUNT keys from FIRST on, where r_{k−1} = r_k (1 + u_k). last: r of the last one."""
    r = (last,)
    for i in tl.static_range(FIRST + COUNT - 1, FIRST, -1):
        last = last * u[i] + last
        r = (last,) + r
    return r


@triton.jit
def dot(x, y, acc=None):
    """Returns x y, added to acc if there is one. float32 takes three products of tf32, which keep its digits."""
    if x.dtype == tl.float32:
        z = tl.dot(x, y, acc, input_precision="tf32x3")
    else:
        z = tl.dot(x, y, acc)
    return z


@triton.jit
def sliced_products(x, y, H: tl.constexpr, BH: tl.constexpr):
    """Returns x yᵀ in float32, loaded 32 dims at a time: the parts of longer rows would not fit the registers.

    x, y: pointers to rows [R, 1], and which of them exist [R].
    """
    WIDTH: tl.constexpr = min(BH, 32)
    for first in tl.static_range(0, BH, WIDTH):
        dims = first + tl.arange(0, WIDTH)
        a = tl.load(x[0] + dims[None, :], mask=x[1][:, None] & (dims < H)[None, :], other=0.0)
        b = tl.load(y[0] + dims[None, :], mask=y[1][:, None] & (dims < H)[None, :], other=0.0)
        if first == 0:
            z = dot(a, tl.trans(b))
        else:
            z = dot(a, tl.trans(b), z)
    return z


@triton.jit
def multiply(x, y, acc, TURN: tl.constexpr, PARTS: tl.constexpr):
    """Returns acc + x y (TURN: acc + xᵀ y). x, float32, is multiplied in y's dtype; two parts keep twice the digits."""
    high = x.to(y.dtype)
    acc = dot(tl.trans(high) if TURN else high, y, acc)
    if PARTS == 2:
        low = (x - high.to(tl.float32)).to(y.dtype)
        acc = dot(tl.trans(low) if TURN else low, y, acc)
    return acc
