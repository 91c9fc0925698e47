"""Triton kernels of the optimizer step over many segments of memory in one launch.

A segment is a contiguous piece of a weight: float32 master weight and moments, the bf16 copy, and the gradient in float32 or
bf16, which may be the sum of PARTS tensors. Tables on the device hold the addresses of all segments, so the number of
launches does not depend on the number of weights. A program handles one chunk of CHUNK elements of one segment, BLOCK at a
time. Each element is read and written once, by one program. No program adds to what another one writes, so results do not
depend on the order in which they run.
"""

import triton
import triton.language as tl

COLUMNS = tl.constexpr(6)  # of the settings: the fields of `Constants`


@triton.jit
def _place(chunk, sizes_ptr, segment_of_ptr, first_chunk_ptr, CHUNK: tl.constexpr):
    """(segment, first element of a chunk in it, elements of the segment). 64 bits: a segment may have 2^31 elements."""
    segment = tl.load(segment_of_ptr + chunk)
    start = (chunk - tl.load(first_chunk_ptr + segment)).to(tl.int64) * CHUNK
    return segment, start, tl.load(sizes_ptr + segment)


@triton.jit
def _pointer(table_ptr, segment, DTYPE: tl.constexpr, ALIGNED: tl.constexpr):
    """The pointer to DTYPE whose address the table holds. ALIGNED: it is a multiple of 16, so that accesses are vectors."""
    pointer = tl.load(table_ptr + segment).to(tl.pointer_type(DTYPE))
    if ALIGNED:
        pointer = tl.multiple_of(pointer, 16)
    return pointer


@triton.jit
def _joined(pointers, pointer):
    last = (pointer,)
    return pointers + last


@triton.jit
def _parts(table_ptr, segment, DTYPE: tl.constexpr, PARTS: tl.constexpr, ALIGNED: tl.constexpr):
    """The pointers of a segment's gradients, as a tuple, from a table [segments, PARTS] of addresses."""
    pointers = _joined((), _pointer(table_ptr, segment * PARTS, DTYPE, ALIGNED))
    for i in tl.static_range(1, PARTS):
        pointers = _joined(pointers, _pointer(table_ptr, segment * PARTS + i, DTYPE, ALIGNED))
    return pointers


@triton.jit
def _load(ptr, at, size, MASKED: tl.constexpr):
    """Elements `at` in float32. Only the last chunk of a segment is masked: a mask would prevent vector accesses."""
    if MASKED:
        return tl.load(ptr + at, at < size, 0.0).to(tl.float32)
    return tl.load(ptr + at).to(tl.float32)


@triton.jit
def _gradient(parts, at, size, PARTS: tl.constexpr, MASKED: tl.constexpr):
    """The sum of the parts in float32, in their order, as `ssscale_kernels.sums` adds them."""
    total = _load(parts[0], at, size, MASKED)
    for i in tl.static_range(1, PARTS):
        total += _load(parts[i], at, size, MASKED)
    return total


@triton.jit
def _store(ptr, at, x, size, MASKED: tl.constexpr):
    x = x.to(ptr.dtype.element_ty)
    if MASKED:
        tl.store(ptr + at, x, at < size)
    else:
        tl.store(ptr + at, x)


@triton.jit
def _squares(parts, start, size, PARTS: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr, MASKED: tl.constexpr):
    total = tl.zeros((BLOCK,), tl.float32)
    for block in range(0, CHUNK, BLOCK):
        x = _gradient(parts, start + block + tl.arange(0, BLOCK), size, PARTS, MASKED)
        total += x * x
    return tl.sum(total)


@triton.jit
def squares_kernel(
    gradients_ptr,
    sizes_ptr,
    segment_of_ptr,
    first_chunk_ptr,
    counted_ptr,
    sums_ptr,
    GRADIENT: tl.constexpr,
    PARTS: tl.constexpr,
    ALIGNED: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Σ g² of each chunk → sums [chunks] float32; 0 for segments that are not counted. Grid: the chunks."""
    segment, start, size = _place(tl.program_id(0), sizes_ptr, segment_of_ptr, first_chunk_ptr, CHUNK)
    if tl.load(counted_ptr + segment) != 0:
        parts = _parts(gradients_ptr, segment, GRADIENT, PARTS, ALIGNED)
        if start + CHUNK <= size:
            total = _squares(parts, start, size, PARTS, CHUNK, BLOCK, False)
        else:
            total = _squares(parts, start, size, PARTS, CHUNK, BLOCK, True)
        tl.store(sums_ptr + tl.program_id(0), total)
    else:
        tl.store(sums_ptr + tl.program_id(0), 0.0)


@triton.jit(do_not_specialize=["num_chunks"])
def total_kernel(sums_ptr, total_ptr, num_chunks, WIDTH: tl.constexpr):
    """sums [num_chunks] → their sum, added in float64 in a fixed order. Grid: one program."""
    total = tl.zeros((WIDTH,), tl.float64)
    for first in range(0, num_chunks, WIDTH):
        at = first + tl.arange(0, WIDTH)
        total += tl.load(sums_ptr + at, at < num_chunks, 0.0).to(tl.float64)
    tl.store(total_ptr, tl.sum(total).to(tl.float32))


@triton.jit
def _update(
    state,
    parts,
    settings_ptr,
    factor,
    start,
    size,
    PARTS: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
    MASKED: tl.constexpr,
):
    """One chunk. Operations are float32 or float64 as in `adamw_reference`."""
    master, exp_avg, exp_avg_sq, rounded = state
    decay, beta1, beta2 = tl.load(settings_ptr), tl.load(settings_ptr + 1), tl.load(settings_ptr + 2)
    eps, step_size = tl.load(settings_ptr + 3), tl.load(settings_ptr + 4).to(tl.float32)
    correction = tl.load(settings_ptr + 5).to(tl.float32)
    for block in range(0, CHUNK, BLOCK):
        at = start + block + tl.arange(0, BLOCK)
        g = (_gradient(parts, at, size, PARTS, MASKED) * factor).to(tl.float64)
        w = _load(master, at, size, MASKED).to(tl.float64)
        m = _load(exp_avg, at, size, MASKED).to(tl.float64)
        v = _load(exp_avg_sq, at, size, MASKED).to(tl.float64)
        w = (w - decay * w).to(tl.float32)
        m = (beta1 * m + (1.0 - beta1) * g).to(tl.float32)
        v = (beta2 * v + (1.0 - beta2) * g * g).to(tl.float32)
        root = tl.div_rn(tl.sqrt_rn(v), correction)
        denominator = (root.to(tl.float64) + eps).to(tl.float32)
        w = w - tl.div_rn(step_size * m, denominator)
        _store(master, at, w, size, MASKED)
        _store(exp_avg, at, m, size, MASKED)
        _store(exp_avg_sq, at, v, size, MASKED)
        _store(rounded, at, w, size, MASKED)


@triton.jit(do_not_specialize=["num_segments", "begin"])
def update_kernel(
    addresses_ptr,
    gradients_ptr,
    sizes_ptr,
    segment_of_ptr,
    first_chunk_ptr,
    group_of_ptr,
    settings_ptr,
    factor_ptr,
    num_segments,
    begin,
    GRADIENT: tl.constexpr,
    PARTS: tl.constexpr,
    ALIGNED: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """AdamW on every element, and its bf16 copy. Changes nothing if the factor is NaN. Grid: the chunks from `begin` on.

    addresses [4, segments] int64 of master, exp_avg, exp_avg_sq and the bf16 copy; gradients [segments, PARTS]
    int64; settings [groups, 6] float64; factor [] float32.
    """
    factor = tl.load(factor_ptr)
    if factor == factor:
        segment, start, size = _place(begin + tl.program_id(0), sizes_ptr, segment_of_ptr, first_chunk_ptr, CHUNK)
        settings_ptr += tl.load(group_of_ptr + segment) * COLUMNS
        state = (
            _pointer(addresses_ptr, segment, tl.float32, ALIGNED),
            _pointer(addresses_ptr + num_segments, segment, tl.float32, ALIGNED),
            _pointer(addresses_ptr + 2 * num_segments, segment, tl.float32, ALIGNED),
            _pointer(addresses_ptr + 3 * num_segments, segment, tl.bfloat16, ALIGNED),
        )
        parts = _parts(gradients_ptr, segment, GRADIENT, PARTS, ALIGNED)
        if start + CHUNK <= size:
            _update(state, parts, settings_ptr, factor, start, size, PARTS, CHUNK, BLOCK, False)
        else:
            _update(state, parts, settings_ptr, factor, start, size, PARTS, CHUNK, BLOCK, True)
