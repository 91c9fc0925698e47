"""The parts of one softmax, over different keys, put together."""

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS = 32


def merge_(o: Tensor, lse: Tensor, o_part: Tensor, lse_part: Tensor) -> None:
    """Adds a part of the keys, in place: o ← e^(lse − l) o + e^(lse_part − l) o_part, lse ← l = ln(e^lse + e^lse_part).

    o [T, N, H] float32 (float64), o_part in any dtype; lse, lse_part [T, N]. Where lse_part is −∞ nothing changes.
    """
    if o.is_cuda:
        rows, head_dim = lse.numel(), o.shape[2]
        padded = max(16, triton.next_power_of_2(head_dim))
        grid = (triton.cdiv(rows, ROWS),)
        merge_kernel[grid](o, lse, o_part, lse_part, rows, H=head_dim, BH=padded, ROWS=ROWS)
        return
    live = (lse_part > -torch.inf)[..., None]
    total = torch.logaddexp(lse, lse_part)
    kept, added = (x.sub(total).exp()[..., None] for x in (lse, lse_part))
    o.copy_(torch.where(live, o * kept + o_part * added, o))
    lse.copy_(total)


@triton.jit
def merge_kernel(
    o_ptr, lse_ptr, o_part_ptr, lse_part_ptr, num_rows, H: tl.constexpr, BH: tl.constexpr, ROWS: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    mask = row < num_rows
    own = tl.load(lse_ptr + row, mask=mask, other=0.0)
    part = tl.load(lse_part_ptr + row, mask=mask, other=float("-inf"))
    live = part > float("-inf")
    high = tl.maximum(own, part)
    total = high + tl.log(tl.exp(own - high) + tl.exp(part - high))
    dim = tl.arange(0, BH)
    at = row[:, None] * H + dim
    inside = live[:, None] & (dim < H)
    o = tl.load(o_ptr + at, mask=inside, other=0.0)
    o_part = tl.load(o_part_ptr + at, mask=inside, other=0.0)
    o = o * tl.exp(own - total)[:, None] + o_part.to(o.dtype) * tl.exp(part - total)[:, None]
    tl.store(o_ptr + at, o, mask=inside)
    tl.store(lse_ptr + row, total, mask=live)
