"""bf16 operands in fp16, whose three more bits make weights and dz eight times more exact on the tensor cores.

Every value of bf16 within 2^-17 of the largest is a value of fp16 once a power of two has brought the largest into
fp16's range. The power is that of a sequence, so that no sequence sees what others hold. q and k are brought to
[2^13, 2^14), v and dO to [2^2, 2^3): then |dO·v| < 64 H, and dz, at most twice that, is within fp16's range when the
weights are multiplied by 2^(8 − log2 H). Whatever is larger than bf16's 2^100 comes out as infinite.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import tile

Q, K, V, DO = range(4)
TARGET = (13, 13, 2, 2)
# Forward's weights, multiplied by 2^8, stay normal numbers down to 2^-22.
FORWARD_SHIFT = tl.constexpr(8.0)


@triton.jit
def exponent(maxima_ptr, sequence, WHICH: tl.constexpr, TARGET: tl.constexpr):
    """e such that the largest of this sequence, times 2^e, lies in [2^TARGET, 2^(TARGET + 1))."""
    bits = tl.load(maxima_ptr + sequence * 4 + WHICH)
    return tl.minimum(tl.maximum(TARGET + 127 - (bits >> 23), -100), 100).to(tl.float32)


@triton.jit
def shifts(maxima_ptr, sequence, BH: tl.constexpr):
    """Powers of two by which backward's quantities are too large: q, k, dO, weights, dz."""
    q = exponent(maxima_ptr, sequence, 0, 13)
    k = exponent(maxima_ptr, sequence, 1, 13)
    v = exponent(maxima_ptr, sequence, 2, 2)
    do = exponent(maxima_ptr, sequence, 3, 2)
    # log2 of BH, a power of two.
    weights: tl.constexpr = 8 - (BH > 16) - (BH > 32) - (BH > 64) - 4
    return q, k, do, weights, weights + do + v


@triton.jit
def enter(maxima_ptr, sequence, WHICH: tl.constexpr, x):
    """Enters the largest finite |x| of a tile into this sequence's maximum."""
    # Floats that are not negative are ordered like their bits.
    x = tl.abs(x.to(tl.float32))
    bits = tl.max(tl.max(tl.where(x < float("inf"), x, 0.0), 1), 0).to(tl.int32, bitcast=True)
    tl.atomic_max(maxima_ptr + sequence * 4 + WHICH, bits, mask=bits > 0)


@triton.jit
def scaled(x, shift):
    """x · 2^shift in fp16."""
    return (x.to(tl.float32) * tl.exp2(shift)).to(tl.float16)


@triton.jit
def _rows(x_ptr, cu_ptr, num_tokens, num_sequences, sx_t, ROWS: tl.constexpr):
    sequence, block = tile.locate(cu_ptr, tl.program_id(0), num_sequences, ROWS)
    start, length = tile.bounds(cu_ptr, sequence, num_tokens)
    row = block * ROWS + tl.arange(0, ROWS)
    return sequence, (start + row).to(tl.int64), (row >= 0) & (row < length)


@triton.jit(do_not_specialize=("num_tokens", "num_heads", "num_sequences"))
def maxima_kernel(
    x_ptr, maxima_ptr, cu_ptr, num_tokens, num_heads, num_sequences, sx_t, sx_n, WHICH: tl.constexpr, H: tl.constexpr,
    BH: tl.constexpr, ROWS: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    sequence, token, row_ok = _rows(x_ptr, cu_ptr, num_tokens, num_sequences, sx_t, ROWS)
    dims = tl.arange(0, BH)
    largest = tl.zeros([ROWS, BH], tl.float32)
    for i in tl.static_range(HEADS):
        head = tl.program_id(1) * HEADS + i
        inside = row_ok[:, None] & (dims < H)[None, :] & (head < num_heads)
        x = tl.load(x_ptr + token[:, None] * sx_t + head * sx_n + dims[None, :], mask=inside, other=0.0)
        x = tl.abs(x.to(tl.float32))
        largest = tl.maximum(largest, tl.where(x < float("inf"), x, 0.0))
    enter(maxima_ptr, sequence, WHICH, largest)


@triton.jit(do_not_specialize=("num_tokens", "num_heads", "num_sequences"))
def convert_kernel(
    x_ptr, out_ptr, maxima_ptr, cu_ptr, num_tokens, num_heads, num_sequences, sx_t, sx_n, WHICH: tl.constexpr,
    TARGET: tl.constexpr, H: tl.constexpr, BH: tl.constexpr, ROWS: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    sequence, token, row_ok = _rows(x_ptr, cu_ptr, num_tokens, num_sequences, sx_t, ROWS)
    dims = tl.arange(0, BH)
    shift = exponent(maxima_ptr, sequence, WHICH, TARGET)
    for i in tl.static_range(HEADS):
        head = tl.program_id(1) * HEADS + i
        inside = row_ok[:, None] & (dims < H)[None, :] & (head < num_heads)
        x = tl.load(x_ptr + token[:, None] * sx_t + head * sx_n + dims[None, :], mask=inside, other=0.0)
        out = (token[:, None] * num_heads + head) * H + dims[None, :]
        tl.store(out_ptr + out, scaled(x, shift), mask=inside)


ROWS, HEADS = 64, 4


def converts(q: Tensor) -> bool:
    """Whether this call's operands are converted: float16 and float32 stay as they are."""
    return q.dtype == torch.bfloat16


def new_maxima(cu_seqlens: Tensor, convert: bool) -> Tensor:
    """For bits of the largest |q|, |k|, |v|, |dO| of each sequence as float32: [num_sequences, 4], or [0, 4]."""
    return torch.zeros((cu_seqlens.shape[0] - 1 if convert else 0, 4), dtype=torch.int32, device=cu_seqlens.device)


def _launch(x: Tensor, cu_seqlens: Tensor, which: int) -> tuple[tuple[int, int], tuple[Any, ...], dict[str, int]]:
    """Grid, counts and constants of the two kernels."""
    num_tokens, num_heads, head_dim = x.shape
    num_sequences = cu_seqlens.shape[0] - 1
    grid = (num_tokens // ROWS + num_sequences, triton.cdiv(num_heads, HEADS))
    counts = (cu_seqlens, num_tokens, num_heads, num_sequences, x.stride(0), x.stride(1))
    block = max(16, triton.next_power_of_2(head_dim))
    return grid, counts, {"WHICH": which, "H": head_dim, "BH": block, "ROWS": ROWS, "HEADS": HEADS}


def find(x: Tensor, cu_seqlens: Tensor, maxima: Tensor, which: int) -> None:
    """Enters the largest of x [T, N, H] into `maxima`, by sequence."""
    grid, counts, shape = _launch(x, cu_seqlens, which)
    maxima_kernel[grid](x, maxima, *counts, **shape)


def to_half(x: Tensor, cu_seqlens: Tensor, maxima: Tensor, which: int) -> Tensor:
    """x [T, N, H] times its sequences' powers of two in fp16, contiguous; its largest are in `maxima` already."""
    grid, counts, shape = _launch(x, cu_seqlens, which)
    out = torch.empty(x.shape, dtype=torch.float16, device=x.device)
    convert_kernel[grid](x, out, maxima, *counts, TARGET=TARGET[which], **shape)
    return out


def operands(
    maxima: Tensor, q: Tensor, k: Tensor, v: Tensor, grad_o: Tensor, cu_q: Tensor, cu_k: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """For backward: all maxima, of which forward has found those of q and v; k and v; and where phase one leaves q and dO."""
    maxima = maxima.clone()
    find(grad_o, cu_q, maxima, DO)
    find(k, cu_k, maxima, K)
    k, v = to_half(k, cu_k, maxima, K), to_half(v, cu_k, maxima, V)
    return maxima, k, v, *(torch.empty(x.shape, dtype=torch.float16, device=x.device) for x in (q, grad_o))
