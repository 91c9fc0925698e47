"""Stick-breaking attention over a paged key/value cache in plain torch: the definition, one sequence at a time."""

import torch
from torch import Tensor

from .reference import stickbreaking_reference


def paged_reference(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    cu_seqlens_q: Tensor,
    seq_lens: Tensor,
    scale: float | None = None,
    skip_below: float = 0.0,
    *,
    remainder: bool = False,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Copies each sequence's keys and values out of the cache and runs `stickbreaking_reference` on them.

    Arguments and results are those of `paged.paged_stickbreaking`. Computes in float64 for float64 inputs and in
    float32 otherwise. `skip_below` and the two maxima are ignored.
    """
    block_size, group = k_cache.shape[1], q.shape[1] // k_cache.shape[2]
    starts = cu_seqlens_q.tolist()
    o, log_rest = torch.zeros_like(q), q.new_zeros(q.shape[:2], dtype=torch.promote_types(q.dtype, torch.float32))
    for i, num_keys in enumerate(seq_lens.tolist()):
        new = slice(starts[i], starts[i + 1])
        position = torch.arange(num_keys, device=q.device)
        blocks = block_table[i, position // block_size].long()
        k, v = (cache[blocks, position % block_size] for cache in (k_cache, v_cache))  # [S, K, H]
        num_queries = starts[i + 1] - starts[i]
        offset = torch.tensor([num_keys - num_queries])
        boundaries = [torch.tensor([0, n]) for n in (num_queries, num_keys)]
        out, rest = stickbreaking_reference(
            q[new], k, v, cu_seqlens_q=boundaries[0], cu_seqlens_k=boundaries[1], q_offsets=offset, scale=scale
        )
        if remainder:
            own = v[num_keys - num_queries :].to(rest.dtype).repeat_interleave(group, 1)
            out = (out.to(rest.dtype) + rest.exp()[..., None] * own).to(q.dtype)
        o[new], log_rest[new] = out, rest
    return o, log_rest
