"""Conversion of bf16 operands to fp16, whose three additional bits make weights and dz eight times as accurate."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import tile

# With this power, forward's weights are normal numbers down to 2^-22.
FORWARD_SHIFT = tl.constexpr(8.0)
# Columns of `maxima`.
Q, K, V, DO = (tl.constexpr(i) for i in range(4))


@triton.jit
def exponent(maxima_ptr, sequence, WHICH: tl.constexpr):
    """Returns e such that the sequence's largest Q, K, V or DO, times 2^e, is in [2^13, 2^14) or [2^2, 2^3)."""
    power: tl.constexpr = 13 if WHICH <= K else 2
    bits = tl.load(maxima_ptr + sequence * 4 + WHICH)
    return tl.minimum(tl.maximum(power + 127 - (bits >> 23), -100), 100).to(tl.float32)


@triton.jit
def shifts(maxima_ptr, sequence, BH: tl.constexpr):
    """Returns the exponents of the power-of-two scales that keep backward in fp16 range: q, k, v, dO, weights, dz."""
    q = exponent(maxima_ptr, sequence, Q)
    k = exponent(maxima_ptr, sequence, K)
    do = exponent(maxima_ptr, sequence, DO)
    # In phase one, dO and v are bf16, so its weights carry the whole power of dz. That must be representable in
    # float32.
    v = tl.minimum(exponent(maxima_ptr, sequence, V), 110 - do)
    # 8 − log2 BH, where BH is a power of two.
    weights: tl.constexpr = 8 - (BH > 16) - (BH > 32) - (BH > 64) - 4
    return q, k, v, do, weights, weights + do + v


@triton.jit
def enter(maxima_ptr, sequence, WHICH: tl.constexpr, x):
    """Updates the sequence's maximum with the largest finite |x| of a tile."""
    # The order of non-negative floats is that of their bits.
    x = tl.abs(x.to(tl.float32))
    bits = tl.max(tl.where(x < float("inf"), x, 0.0)).to(tl.int32, bitcast=True)
    tl.atomic_max(maxima_ptr + sequence * 4 + WHICH, bits, mask=bits > 0, sem="relaxed")


@triton.jit
def scaled(x, shift):
    """Returns x · 2^shift in fp16."""
    return (x.to(tl.float32) * tl.exp2(shift)).to(tl.float16)


@triton.jit
def _place(cu_ptr, program, num_tokens, num_heads, num_sequences, ROWS: tl.constexpr):
    """Returns sequence, tokens, mask of existing tokens, and head of a program for ROWS tokens of one head."""
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
    """Finds the largest |v| and, with a second row of programs, the largest |k|. Grid: (programs, 1 or 2)."""
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
    """Converts v to fp16. Grid: (programs)."""
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
    """Converts k to fp16 and finds the largest |dO|. Grid: (key_programs + programs for dO)."""
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
    """Whether operands are converted. float16 and float32 stay as they are."""
    return q.dtype == torch.bfloat16


def new_maxima(cu_seqlens: Tensor, convert: bool) -> Tensor:
    """Returns [num_sequences, 4] (or [0, 4]) zeros for the float32 bits of the largest |q|, |k|, |v| and |dO|."""
    return torch.zeros((cu_seqlens.shape[0] - 1 if convert else 0, 4), dtype=torch.int32, device=cu_seqlens.device)


def shape_constants(head_dim: int) -> dict[str, int]:
    return {"H": head_dim, "BH": max(16, triton.next_power_of_2(head_dim)), "ROWS": ROWS}


def _programs(x: Tensor, num_sequences: int) -> int:
    return (x.shape[0] // ROWS + num_sequences) * x.shape[1]


def values(maxima: Tensor, k: Tensor, v: Tensor, cu_k: Tensor, search_k: bool) -> Tensor:
    """Returns v in fp16, contiguous, for forward.

    Updates `maxima` with the largest |v| of v [S, K, H] and, if `search_k`, with the largest |k|.
    """
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
    """Returns the operands of backward: all maxima, k in fp16, and buffers in which phase one stores q and dO in fp16.

    Forward has found the maxima of q, k and v. v stays bf16: phase one uses it only for dO·v, which is exact in bf16,
    and phase two reads it once and converts it then.
    """
    maxima = maxima.clone()
    k_half, q_half, do_half = (torch.empty(x.shape, dtype=torch.float16, device=x.device) for x in (k, q, grad_o))
    sequences = cu_k.shape[0] - 1
    programs = _programs(k, sequences)
    operands_kernel[(programs + _programs(grad_o, sequences),)](
        k, grad_o, k_half, maxima, cu_q, cu_k, q.shape[0], q.shape[1], k.shape[0], k.shape[1], sequences, programs,
        *k.stride()[:2], *grad_o.stride()[:2], **shape_constants(q.shape[2]),
    )  # fmt: skip
    return maxima, k_half, q_half, do_half
