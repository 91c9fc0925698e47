"""Conversion of bf16 operands to fp16, whose three additional bits make weights and dz eight times as accurate."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import blocks
from .launching import begin, cdiv, launch_kernel

# With this power, forward's weights are normal numbers down to 2^-22.
FORWARD_SHIFT = tl.constexpr(8.0)
# Columns of `maxima`.
Q, K, V, DO = (tl.constexpr(i) for i in range(4))


# k and v are converted with 2^USUAL before their maxima are known. This is kept for sequences whose maximum then lies in
# [2^2, 2^16), where fp16 expresses all bf16 numbers down to 2^-19 of the maximum exactly.
USUAL = tl.constexpr(8)
SMALLEST, LARGEST = tl.constexpr(2 - 8), tl.constexpr(15 - 8)  # exponents of the maxima


@triton.jit
def _exponent(bits, POWER: tl.constexpr):
    """Returns e such that a maximum, given by its bits, is in [2^POWER, 2^(POWER + 1)) when it is multiplied by 2^e."""
    return tl.minimum(tl.maximum(POWER + 127 - (bits >> 23), -100), 100)


@triton.jit
def exponent(maxima_ptr, sequence, WHICH: tl.constexpr):
    """Returns e such that the sequence's largest Q, V or DO, times 2^e, is in [2^13, 2^14) or, for V and DO, [2^2, 2^3)."""
    bits = tl.load(maxima_ptr + sequence * 4 + WHICH)
    return _exponent(bits, 13 if WHICH == Q else 2).to(tl.float32)


@triton.jit
def _conversion_exponent(bits):
    power = (bits >> 23) - 127
    return tl.where((power >= SMALLEST) & (power <= LARGEST), USUAL, _exponent(bits, 13))


@triton.jit
def conversion_exponent(maxima_ptr, sequence, WHICH: tl.constexpr):
    """Returns the exponent e of the scale 2^e with which `convert` has converted the sequence's K or V."""
    return _conversion_exponent(tl.load(maxima_ptr + sequence * 4 + WHICH)).to(tl.float32)


@triton.jit
def shifts(maxima_ptr, sequence, BH: tl.constexpr):
    """Returns the exponents of the power-of-two scales that keep backward in fp16 range: q, k, v, dO, weights, dz."""
    q = exponent(maxima_ptr, sequence, Q)
    k = conversion_exponent(maxima_ptr, sequence, K)
    do = exponent(maxima_ptr, sequence, DO)
    # In phase one, dO and v are bf16, so its weights carry the whole power of dz. That must be representable in
    # float32.
    v = tl.minimum(exponent(maxima_ptr, sequence, V), 110 - do)
    # 8 − log2 BH, where BH is a power of two.
    weights: tl.constexpr = 8 - (BH > 16) - (BH > 32) - (BH > 64) - 4
    return q, k, v, do, weights, weights + do + v


@triton.jit
def largest(x):
    """Returns the bits of the largest finite |x| of a tile as float32. The order of non-negative floats is theirs."""
    x = tl.abs(x.to(tl.float32))
    found = tl.max(x)
    if not found < float("inf"):
        found = tl.max(tl.where(x < float("inf"), x, 0.0))
    return found.to(tl.int32, bitcast=True)


@triton.jit
def enter(maxima_ptr, sequence, WHICH: tl.constexpr, x):
    """Updates the sequence's maximum with that of a tile."""
    bits = largest(x)
    tl.atomic_max(maxima_ptr + sequence * 4 + WHICH, bits, mask=bits > 0, sem="relaxed")


@triton.jit
def scaled(x, shift):
    """Returns x · 2^shift in fp16."""
    return (x.to(tl.float32) * tl.exp2(shift)).to(tl.float16)


@triton.jit
def load_rows(
    x_ptr,  # [num_tokens, num_heads, H], with strides sx_t, sx_n and 1
    cu_ptr,
    program,
    num_tokens,
    num_heads,
    num_sequences,
    sx_t,
    sx_n,
    H: tl.constexpr,
    BH: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Returns a program's sequence, its ROWS tokens of one head, their places in contiguous memory, and which exist."""
    sequence, block = blocks.locate(cu_ptr, program // num_heads, num_sequences, ROWS)
    head = program % num_heads
    start, length = blocks.bounds(cu_ptr, sequence, num_tokens)
    row = block * ROWS + tl.arange(0, ROWS)
    token = (start + row).to(tl.int64)
    dims = tl.arange(0, BH)
    inside = ((row >= 0) & (row < length))[:, None] & (dims < H)[None, :]
    x = tl.load(x_ptr + token[:, None] * sx_t + head * sx_n + dims[None, :], mask=inside, other=0.0)
    return sequence, x, (token[:, None] * num_heads + head) * H + dims[None, :], inside


COUNTS = ("num_x", "num_x_heads", "num_y", "num_y_heads", "num_sequences", "num_shares", "x_programs", "num_zeros")


@triton.jit(do_not_specialize=COUNTS)
def convert_kernel(
    x_ptr,  # k or v [num_x, num_x_heads, H]
    half_ptr,  # [num_x, num_x_heads, H]
    x_max_ptr,  # [x_programs]
    y_ptr,  # dO [num_y, num_y_heads, H] or None
    y_max_ptr,
    zeros_ptr,  # [num_zeros] or None
    cu_x_ptr,
    cu_y_ptr,
    num_x,
    num_x_heads,
    num_y,
    num_y_heads,
    num_sequences,
    x_programs,
    num_zeros,
    sx_t,
    sx_n,
    sy_t,
    sy_n,
    H: tl.constexpr,
    BH: tl.constexpr,
    ROWS: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Converts x with the usual scale, finds the largest |x| and |y| of each program, and fills zeros_ptr with zeros."""
    begin(EARLY)
    program = tl.program_id(0)
    if zeros_ptr is not None:
        for first in range(program * ROWS, num_zeros, x_programs * ROWS):
            spare = first + tl.arange(0, ROWS)
            tl.store(zeros_ptr + spare, tl.zeros([ROWS], tl.int32), mask=spare < num_zeros)
    if program < x_programs:
        x = load_rows(x_ptr, cu_x_ptr, program, num_x, num_x_heads, num_sequences, sx_t, sx_n, H, BH, ROWS)
        tl.store(half_ptr + x[2], (x[1].to(tl.float32) * 2**USUAL).to(tl.float16), mask=x[3])
        tl.store(x_max_ptr + program, largest(x[1]))
    elif y_ptr is not None:
        place = program - x_programs
        y = load_rows(y_ptr, cu_y_ptr, place, num_y, num_y_heads, num_sequences, sy_t, sy_n, H, BH, ROWS)
        tl.store(y_max_ptr + place, largest(y[1]))


@triton.jit
def _maximum(max_ptr, first, last):
    """Returns the largest of the integers first … last − 1."""
    found = tl.zeros([1024], tl.int32)
    for start in range(first, last, 1024):
        place = start + tl.arange(0, 1024)
        found = tl.maximum(found, tl.load(max_ptr + place, mask=place < last, other=0))
    return tl.max(found, 0)


@triton.jit
def _slots(cu_ptr, sequence, num_tokens, num_sequences, ROWS: tl.constexpr):
    """Returns the first slot of a sequence and of the next one (see `blocks.locate`)."""
    first = tl.load(cu_ptr + sequence).to(tl.int32) // ROWS + sequence
    last = tl.load(cu_ptr + sequence + 1).to(tl.int32) // ROWS + sequence + 1
    return first, tl.minimum(last, num_tokens // ROWS + num_sequences)


@triton.jit(do_not_specialize=COUNTS)
def settle_kernel(
    x_ptr,  # as for `convert_kernel`
    half_ptr,
    x_max_ptr,
    y_max_ptr,
    saved_ptr,  # maxima of forward [num_sequences, 4], or None in forward
    maxima_ptr,  # [num_sequences, 4]
    cu_x_ptr,
    cu_y_ptr,
    num_x,
    num_x_heads,
    num_y,
    num_y_heads,
    num_sequences,
    num_shares,
    sx_t,
    sx_n,
    H: tl.constexpr,
    BH: tl.constexpr,
    ROWS: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Writes the maxima of all sequences, and converts x again where the usual scale does not suit its maximum.

    Grid: (num_sequences · num_shares). Each program does its share of a sequence.
    """
    begin(EARLY)
    sequence, share = tl.program_id(0) // num_shares, tl.program_id(0) % num_shares
    first, last = _slots(cu_x_ptr, sequence, num_x, num_sequences, ROWS)
    x_max = _maximum(x_max_ptr, first * num_x_heads, last * num_x_heads)
    if share == 0:
        row = maxima_ptr + sequence * 4
        if saved_ptr is None:
            tl.store(row + Q, 0)
            tl.store(row + K, 0)
            tl.store(row + V, x_max)
            tl.store(row + DO, 0)
        else:
            y_first, y_last = _slots(cu_y_ptr, sequence, num_y, num_sequences, ROWS)
            tl.store(row + Q, tl.load(saved_ptr + sequence * 4 + Q))
            tl.store(row + K, x_max)
            tl.store(row + V, tl.load(saved_ptr + sequence * 4 + V))
            tl.store(row + DO, _maximum(y_max_ptr, y_first * num_y_heads, y_last * num_y_heads))
    power = _conversion_exponent(x_max)
    if (power != USUAL) & (x_max > 0):
        for program in range(first * num_x_heads + share, last * num_x_heads, num_shares):
            _, x, places, inside = load_rows(
                x_ptr, cu_x_ptr, program, num_x, num_x_heads, num_sequences, sx_t, sx_n, H, BH, ROWS
            )
            tl.store(half_ptr + places, scaled(x, power.to(tl.float32)), mask=inside)


ROWS = 64
PROGRAMS = 256  # of settle_kernel, about


def converts(q: Tensor) -> bool:
    """Whether operands are converted. float16 and float32 stay as they are."""
    return q.dtype == torch.bfloat16


def new_maxima(cu_seqlens: Tensor, convert: bool) -> Tensor:
    """Returns [num_sequences, 4] (or [0, 4]) zeros for the float32 bits of the largest |q|, |k|, |v| and |dO|."""
    return torch.zeros((cu_seqlens.shape[0] - 1 if convert else 0, 4), dtype=torch.int32, device=cu_seqlens.device)


def shape_constants(head_dim: int) -> dict[str, int]:
    return {"H": head_dim, "BH": max(16, triton.next_power_of_2(head_dim)), "ROWS": ROWS}


def _programs(x: Tensor, num_sequences: int) -> int:
    return (x.shape[0] // ROWS + num_sequences) * x.shape[1]


def _convert(
    x: Tensor,
    cu_x: Tensor,
    y: Tensor | None,
    cu_y: Tensor,
    saved: Tensor | None,
    zeros: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Returns x in fp16, contiguous, and the maxima of all sequences: those of x and y, and others from `saved`.

    In one pass over x and y, and a second launch that usually ends at once.
    """
    sequences, head_dim = cu_x.shape[0] - 1, x.shape[2]
    x_programs, y_programs = _programs(x, sequences), 0 if y is None else _programs(y, sequences)
    found = torch.empty(x_programs + y_programs, dtype=torch.int32, device=x.device)
    x_max, y_max = found[:x_programs], found[x_programs:]
    maxima = torch.empty((sequences, 4), dtype=torch.int32, device=x.device)
    out = torch.empty(x.shape, dtype=torch.float16, device=x.device)
    counts = (*x.shape[:2], *(x if y is None else y).shape[:2], sequences)
    strides_y = x.stride()[:2] if y is None else y.stride()[:2]
    strides_x, constants = x.stride()[:2], shape_constants(head_dim)
    numbers = (*counts, x_programs, 0 if zeros is None else zeros.numel(), *strides_x, *strides_y)
    tensors = (x, out, x_max, y, y_max, zeros, cu_x, cu_y)
    launch_kernel(convert_kernel, x_programs + y_programs, tensors, numbers, constants, False)
    shares = cdiv(PROGRAMS, sequences)
    tensors = (x, out, x_max, y_max, saved, maxima, cu_x, cu_y)
    launch_kernel(settle_kernel, sequences * shares, tensors, (*counts, shares, *strides_x), constants, True)
    return out, maxima


def values(v: Tensor, cu_k: Tensor, zeros: Tensor) -> tuple[Tensor, Tensor]:
    """Returns v [S, K, H] in fp16 for forward, and maxima with those of v. Fills `zeros`, int32, with zeros on the way."""
    return _convert(v, cu_k, None, cu_k, None, zeros)


def operands(maxima: Tensor, k: Tensor, grad_o: Tensor, cu_q: Tensor, cu_k: Tensor) -> tuple[Tensor, Tensor]:
    """Returns k in fp16 and all maxima for backward. maxima: those of q and v, from forward.

    v stays bf16: phase one uses it only for dO·v, which is exact in bf16, and phase two reads it once and converts it
    then. Phase one also stores q and dO in fp16 for phase two.
    """
    return _convert(k, cu_k, grad_o, cu_q, maxima, None)
