"""Merges the results of softmax attention over different keys into those over all of them."""

import torch
import triton
import triton.language as tl
from torch import Tensor

# (token, head) pairs per program.
PAIRS = tl.constexpr(32)


def merge_(o: Tensor, lse: Tensor, o_new: Tensor, lse_new: Tensor) -> None:
    """Adds further keys, in place: o ← e^(lse − l) o + e^(lse_new − l) o_new and lse ← l, l = ln(e^lse + e^lse_new).

    o [T, N, H] float32 (float64), contiguous; o_new [T, N, H] in any floating dtype. lse, lse_new [T, N]: the natural
    logarithm of the sum of exponentials, in the dtype of o. Where lse_new is −∞ (no further keys) nothing changes,
    and o_new may hold anything.
    """
    if o.is_cuda:
        num_pairs, head_dim = lse.numel(), o.shape[2]
        padded = max(16, triton.next_power_of_2(head_dim))
        grid = (triton.cdiv(num_pairs, PAIRS.value),)
        merge_kernel[grid](o, lse, o_new, lse_new, num_pairs, H=head_dim, BH=padded)
        return
    live = (lse_new > -torch.inf)[..., None]
    total = torch.logaddexp(lse, lse_new)
    kept, added = (x.sub(total).exp()[..., None] for x in (lse, lse_new))
    o.copy_(torch.where(live, o * kept + o_new * added, o))
    lse.copy_(total)


@triton.jit
def merge_kernel(
    o_ptr,
    lse_ptr,
    o_new_ptr,
    lse_new_ptr,
    num_pairs,
    H: tl.constexpr,
    BH: tl.constexpr,
):
    """`merge_` of PAIRS (token, head) pairs per program; BH is H rounded up to a power of two of at least 16."""
    # [PAIRS] in 64 bits, because T · N · H may not fit into 32.
    pair = tl.program_id(0).to(tl.int64) * PAIRS + tl.arange(0, PAIRS)
    mask = pair < num_pairs
    own = tl.load(lse_ptr + pair, mask=mask, other=0.0)
    new = tl.load(lse_new_ptr + pair, mask=mask, other=float("-inf"))
    live = new > float("-inf")
    # Subtracting the larger one keeps the exponentials at 1 or below.
    high = tl.maximum(own, new)
    total = high + tl.log(tl.exp(own - high) + tl.exp(new - high))
    dim = tl.arange(0, BH)
    # [PAIRS, BH]
    at = pair[:, None] * H + dim
    inside = live[:, None] & (dim < H)
    o = tl.load(o_ptr + at, mask=inside, other=0.0)
    o_new = tl.load(o_new_ptr + at, mask=inside, other=0.0)
    o = o * tl.exp(own - total)[:, None] + o_new.to(o.dtype) * tl.exp(new - total)[:, None]
    tl.store(o_ptr + at, o, mask=inside)
    tl.store(lse_ptr + pair, total, mask=live)
