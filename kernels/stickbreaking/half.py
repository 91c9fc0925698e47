"""bf16 operands in fp16, whose three more bits make weights and dz eight times more exact on the tensor cores.

Every value of bf16 within 2^-17 of the largest is a value of fp16 once a power of two has brought the largest into
fp16's range. The power is that of a sequence, so that no sequence sees what others hold. q and k are brought to
[2^13, 2^14), v and dO to [2^2, 2^3): then |dO·v| < 64 H, and dz, at most twice that, is within fp16's range when the
weights are multiplied by 2^(8 − log2 H). Whatever is larger than bf16's 2^100 comes out as infinite.

Backward's phase one takes dO·v from bf16, in which it is as exact, and gives its weights dO's and v's powers too; phase two
converts v, which it reads once. So v is converted in memory for forward alone.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import tile

# Forward's weights, multiplied by 2^8, stay normal numbers down to 2^-22.
FORWARD_SHIFT = tl.constexpr(8.0)
# Columns of the maxima.
Q, K, V, DO = (tl.constexpr(i) for i in range(4))


@triton.jit
def exponent(maxima_ptr, sequence, WHICH: tl.constexpr):
    """e such that this sequence's largest of Q, K, V or DO, times 2^e, lies in [2^13, 2^14) or [2^2, 2^3)."""
    power: tl.constexpr = 13 if WHICH <= K else 2
    bits = tl.load(maxima_ptr + sequence * 4 + WHICH)
    return tl.minimum(tl.maximum(power + 127 - (bits >> 23), -100), 100).to(tl.float32)


@triton.jit
def shifts(maxima_ptr, sequence, BH: tl.constexpr):
    """Powers of two by which backward's quantities are too large: q, k, v, dO, weights, dz."""
    q = exponent(maxima_ptr, sequence, Q)
    k = exponent(maxima_ptr, sequence, K)
    do = exponent(maxima_ptr, sequence, DO)
    # Phase one multiplies its weights by all of dz's power, for its dO and v are bf16: that must be a float32.
    v = tl.minimum(exponent(maxima_ptr, sequence, V), 110 - do)
    # log2 of BH, a power of two.
    weights: tl.constexpr = 8 - (BH > 16) - (BH > 32) - (BH > 64) - 4
    return q, k, v, do, weights, weights + do + v


@triton.jit
def enter(maxima_ptr, sequence, WHICH: tl.constexpr, x):
    """Enters the largest finite |x| of a tile into this sequence's maximum."""
    # Floats that are not negative are ordered like their bits.
    x = tl.abs(x.to(tl.float32))
    bits = tl.max(tl.where(x < float("inf"), x, 0.0)).to(tl.int32, bitcast=True)
    tl.atomic_max(maxima_ptr + sequence * 4 + WHICH, bits, mask=bits > 0, sem="relaxed")


@triton.jit
def scaled(x, shift):
    """x · 2^shift in fp16."""
    return (x.to(tl.float32) * tl.exp2(shift)).to(tl.float16)


@triton.jit
def _place(cu_ptr, program, num_tokens, num_heads, num_sequences, ROWS: tl.constexpr):
    """Sequence, tokens, which of them exist, and head of a program that takes ROWS tokens of one head."""
    sequence, block = tile.locate(cu_ptr, program // num_heads, num_sequences, ROWS)
    start, length = tile.bounds(cu_ptr, sequence, num_tokens)
    row = block * ROWS + tl.arange(0, ROWS)
    return sequence, (start + row).to(tl.int64), (row >= 0) & (row < length), program % num_heads


@triton.jit
def _search(
    x_ptr, maxima_ptr, cu_ptr, program, num_tokens, num_heads, num_sequences, sx_t, sx_n, WHICH: tl.constexpr,
    H: tl.constexpr, BH: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    sequence, token, row_ok, head = _place(cu_ptr, program, num_tokens, num_heads, num_sequences, ROWS)
    dims = tl.arange(0, BH)
    inside = row_ok[:, None] & (dims < H)[None, :]
    x = tl.load(x_ptr + token[:, None] * sx_t + head * sx_n + dims[None, :], mask=inside, other=0.0)
    enter(maxima_ptr, sequence, WHICH, x)


@triton.jit
def _convert(
    x_ptr, out_ptr, maxima_ptr, cu_ptr, program, num_tokens, num_heads, num_sequences, sx_t, sx_n, WHICH: tl.constexpr,
    H: tl.constexpr, BH: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    sequence, token, row_ok, head = _place(cu_ptr, program, num_tokens, num_heads, num_sequences, ROWS)
    dims = tl.arange(0, BH)
    inside = row_ok[:, None] & (dims < H)[None, :]
    x = tl.load(x_ptr + token[:, None] * sx_t + head * sx_n + dims[None, :], mask=inside, other=0.0)
    out = (token[:, None] * num_heads + head) * H + dims[None, :]
    tl.store(out_ptr + out, scaled(x, exponent(maxima_ptr, sequence, WHICH)), mask=inside)


COUNTS = ("num_tokens", "num_heads", "num_keys", "num_kv_heads", "num_sequences", "key_programs")


@triton.jit(do_not_specialize=COUNTS)
def key_maxima_kernel(
    k_ptr, v_ptr, maxima_ptr, cu_k_ptr, num_keys, num_kv_heads, num_sequences, sk_t, sk_n, sv_t, sv_n,
    H: tl.constexpr, BH: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Enters the largest |v|, and |k| too if there is a second row of programs. Grid (programs, 1 or 2)."""
    program = tl.program_id(0)
    if tl.program_id(1) == 0:
        _search(
            v_ptr, maxima_ptr, cu_k_ptr, program, num_keys, num_kv_heads, num_sequences, sv_t, sv_n, V, H, BH, ROWS
        )  # fmt: skip
    else:
        _search(
            k_ptr, maxima_ptr, cu_k_ptr, program, num_keys, num_kv_heads, num_sequences, sk_t, sk_n, K, H, BH, ROWS
        )  # fmt: skip


@triton.jit(do_not_specialize=COUNTS)
def value_kernel(
    v_ptr, v_half_ptr, maxima_ptr, cu_k_ptr, num_keys, num_kv_heads, num_sequences, sv_t, sv_n,
    H: tl.constexpr, BH: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Converts v. Grid (programs)."""
    _convert(
        v_ptr, v_half_ptr, maxima_ptr, cu_k_ptr, tl.program_id(0), num_keys, num_kv_heads, num_sequences, sv_t, sv_n, V,
        H, BH, ROWS,
    )  # fmt: skip


@triton.jit(do_not_specialize=COUNTS)
def operands_kernel(
    k_ptr, do_ptr, k_half_ptr, maxima_ptr, cu_q_ptr, cu_k_ptr, num_tokens, num_heads, num_keys, num_kv_heads, num_sequences,
    key_programs, sk_t, sk_n, so_t, so_n,
    H: tl.constexpr, BH: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Converts k and enters the largest |dO|. Grid (key_programs + dO's programs)."""
    program = tl.program_id(0)
    if program < key_programs:
        _convert(
            k_ptr, k_half_ptr, maxima_ptr, cu_k_ptr, program, num_keys, num_kv_heads, num_sequences, sk_t, sk_n, K, H, BH,
            ROWS,
        )  # fmt: skip
    else:
        _search(
            do_ptr, maxima_ptr, cu_q_ptr, program - key_programs, num_tokens, num_heads, num_sequences, so_t, so_n, DO, H, BH,
            ROWS,
        )  # fmt: skip


ROWS = 64


def converts(q: Tensor) -> bool:
    """Whether this call's operands are converted: float16 and float32 stay as they are."""
    return q.dtype == torch.bfloat16


def new_maxima(cu_seqlens: Tensor, convert: bool) -> Tensor:
    """For bits of the largest |q|, |k|, |v|, |dO| of each sequence as float32: [num_sequences, 4], or [0, 4]."""
    return torch.zeros((cu_seqlens.shape[0] - 1 if convert else 0, 4), dtype=torch.int32, device=cu_seqlens.device)


def shape_constants(head_dim: int) -> dict[str, int]:
    return {"H": head_dim, "BH": max(16, triton.next_power_of_2(head_dim)), "ROWS": ROWS}


def _programs(x: Tensor, num_sequences: int) -> int:
    return (x.shape[0] // ROWS + num_sequences) * x.shape[1]


def values(maxima: Tensor, k: Tensor, v: Tensor, cu_k: Tensor, search_k: bool) -> Tensor:
    """For forward: v in fp16, contiguous. Enters the largest of v [S, K, H] into `maxima`, and of k where that is asked for."""
    sequences, (num_keys, num_kv_heads, head_dim) = cu_k.shape[0] - 1, k.shape
    strides_k, strides_v = k.stride()[:2], v.stride()[:2]
    counts = (maxima, cu_k, num_keys, num_kv_heads, sequences)
    programs = _programs(v, sequences)
    key_maxima_kernel[(programs, 2 if search_k else 1)](
        k, v, *counts, *strides_k, *strides_v, **shape_constants(head_dim)
    )
    out = torch.empty(v.shape, dtype=torch.float16, device=v.device)
    value_kernel[(programs,)](v, out, *counts, *strides_v, **shape_constants(head_dim))
    return out


def operands(
    maxima: Tensor, q: Tensor, k: Tensor, grad_o: Tensor, cu_q: Tensor, cu_k: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """For backward: all maxima, of which forward has found q's, k's and v's; k; and where phase one leaves q and dO.
    v stays bf16: phase one needs dO·v alone, which is exact in it, and phase two reads it once and converts it there."""
    maxima = maxima.clone()
    k_half, q_half, do_half = (torch.empty(x.shape, dtype=torch.float16, device=x.device) for x in (k, q, grad_o))
    sequences = cu_k.shape[0] - 1
    programs = _programs(k, sequences)
    operands_kernel[(programs + _programs(grad_o, sequences),)](
        k, grad_o, k_half, maxima, cu_q, cu_k, q.shape[0], q.shape[1], k.shape[0], k.shape[1], sequences, programs,
        *k.stride()[:2], *grad_o.stride()[:2], **shape_constants(q.shape[2]),
    )  # fmt: skip
    return maxima, k_half, q_half, do_half
