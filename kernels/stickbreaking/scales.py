"""Power-of-two scales that keep backward in fp16 range, also where log_rest has a gradient.

dz = g − β (d_log_rest + Σ g), and half.py bounds |g| and |Σ g|. With |d_log_rest| · 2^(scale of dz) ≤ 2^14 as well, |dz| stays
below 3 · 2^14, which fp16 can express.
"""

import triton
import triton.language as tl
from torch import Tensor

from . import half


@triton.jit
def shifts(maxima_ptr, rest_max_ptr, sequence, BH: tl.constexpr, HAS_REST: tl.constexpr):
    """Returns `half.shifts`, in which v's exponent is small enough for the gradient of log_rest."""
    q, k, v, do, weights, dz = half.shifts(maxima_ptr, sequence, BH)
    if HAS_REST:
        # d_log_rest · 2^rest is below 2^3.
        rest = half.exponent(rest_max_ptr, sequence, half.DO)
        v = tl.minimum(v, rest + 11 - weights - do)
        dz = weights + do + v
    return q, k, v, do, weights, dz


@triton.jit(do_not_specialize=("num_tokens", "num_sequences"))
def rest_maxima_kernel(
    rest_ptr, rest_max_ptr, cu_q_ptr, num_tokens, num_sequences,
    NUM_HEADS: tl.constexpr, PADDED_HEADS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    sequence, rest, _, _ = half.load_rows(
        rest_ptr, cu_q_ptr, tl.program_id(0), num_tokens, 1, num_sequences, NUM_HEADS, 0, NUM_HEADS, PADDED_HEADS, ROWS
    )
    half.enter(rest_max_ptr, sequence, half.DO, rest)


def rest_maxima(grad_log_rest: Tensor, cu_q: Tensor) -> Tensor:
    """Returns the float32 bits of each sequence's largest |d_log_rest| in column DO of [num_sequences, 4]."""
    num_tokens, num_heads = grad_log_rest.shape
    maxima = half.new_maxima(cu_q, True)
    num_sequences = maxima.shape[0]
    rest_maxima_kernel[(num_tokens // half.ROWS + num_sequences,)](
        grad_log_rest, maxima, cu_q, num_tokens, num_sequences,
        NUM_HEADS=num_heads, PADDED_HEADS=triton.next_power_of_2(num_heads), ROWS=half.ROWS,
    )  # fmt: skip
    return maxima
