"""Runs the paged kernels under the interpreter (interpreted.py), for one dtype of "float16", "bfloat16" and "float32":
a process of its own.

Prints one JSON object a case: errors against float64, and those of float32 torch with inputs and outputs in the same dtype.
"""

import json
import sys
from typing import NamedTuple
from unittest.mock import patch

import torch
import triton
from ssscale_kernels.stickbreaking import paged_launch
from ssscale_kernels.stickbreaking.paged_reference import paged_reference
from torch import Tensor

from tests.kernels.interpreted import hasten, repair_bfloat16


class Case(NamedTuple):
    """One batch. queries, keys: of each sequence, the keys with those of the new tokens."""

    queries: list[int]
    keys: list[int]
    block_size: int = 16
    num_heads: int = 2
    num_kv_heads: int = 1
    head_dim: int = 16
    std: float = 1.0  # of q; below 0, of low logits
    opposed: bool = False  # every second key equals the one before, with −v: weights cancel, and their rounding remains
    huge_keys: int = 0  # keys at the start of a sequence, times −50: with low logits, these become huge
    remainder: bool = False
    max_seqlen_q: int | None = None
    max_seqlen_k: int | None = None
    num_splits: int | None = None
    shared: int = 0  # blocks at the start that all sequences share
    heads_first: bool = False  # the order in memory: heads before slots, k and v interleaved
    padding: int = 0  # tokens of q after the last sequence
    split_rows: tuple[int, ...] = paged_launch.SPLIT_ROWS  # the kernel's choices of rows


CASES = {
    "prefill": Case([70], [70], num_heads=1),
    "chunk": Case([66], [150], block_size=32, remainder=True, max_seqlen_q=66),
    "mixed": Case([1, 0, 65, 3, 0, 20], [100, 0, 130, 3, 40, 85], remainder=True, shared=2),
    "decode": Case([1, 1, 0, 1], [300, 65, 20, 1], num_heads=6, num_kv_heads=2, max_seqlen_q=1, num_splits=3),
    "remainder": Case(
        [1, 2, 1], [129, 17, 1], num_heads=6, num_kv_heads=2, remainder=True, max_seqlen_q=2, num_splits=7
    ),
    "64 rows": Case([6, 5, 0], [150, 5, 70], num_heads=6, num_kv_heads=2, max_seqlen_q=6, num_splits=2),
    "many splits": Case([1], [8300], num_heads=1, max_seqlen_q=1, num_splits=200),
    "more splits than tiles": Case([1, 1, 2], [700, 64, 66], max_seqlen_q=2, num_splits=50, remainder=True),
    "one split": Case(
        [1, 2, 0, 1], [129, 17, 9, 1], num_heads=6, num_kv_heads=2, remainder=True, max_seqlen_q=2, num_splits=1
    ),
    "long rows": Case([1, 6, 2], [300, 64, 66], max_seqlen_q=6, num_splits=2, remainder=True),
    "blocks of 64": Case([1, 70], [64, 128], block_size=64, shared=1),
    "blocks of 128": Case([2, 40], [300, 129], block_size=128, remainder=True),
    "blocks of 8": Case([1, 40], [100, 97], block_size=8),
    "blocks of 2": Case([1, 40], [70, 65], block_size=2, remainder=True),
    "blocks of 48": Case([1, 40], [100, 97], block_size=48),
    "wide": Case([2, 70], [70, 75], head_dim=72, num_heads=1),
    "narrow": Case([2, 40], [70, 65], head_dim=24, block_size=32, heads_first=True),
    "one dim": Case([3, 70], [70, 100], head_dim=1),
    "loose bounds": Case([1, 2], [90, 40], max_seqlen_q=5, max_seqlen_k=5000, remainder=True, padding=3),
    "padding": Case([20, 0], [33, 0], padding=70),
    "more heads than rows": Case([1], [17], num_heads=66, remainder=True),
    "no split": Case([1, 3, 0, 70], [17, 40, 9, 70], num_heads=3, remainder=True, split_rows=(1, 2)),
    "huge": Case([1, 40], [100, 90], std=30.0),
    "huge chunk": Case([1, 70], [100, 200], std=30.0, remainder=True),
    "huge far keys": Case([1, 70], [100, 150], std=-20.0, remainder=True, huge_keys=30),
    "low": Case([1, 40], [100, 90], std=-20.0, remainder=True),
    "opposed": Case([40], [500], std=-60.0, head_dim=64, opposed=True),
}
# Some of their sequences go to the prefill kernels.
PREFILLS = (
    "prefill", "chunk", "mixed", "blocks of 64", "blocks of 128", "blocks of 8", "blocks of 2", "blocks of 48", "wide",
    "narrow", "one dim", "padding", "no split", "huge", "huge chunk", "huge far keys", "low", "opposed",
)  # fmt: skip
SKIPPING = {
    "skip": Case([300], [300], std=6.0),
    "skip chunks": Case([1, 70, 40], [500, 400, 100], std=6.0, remainder=True),
    "skip low": Case([40], [900], std=-40.0, head_dim=64),
    "skip decode": Case([1, 3], [900, 700], std=6.0, max_seqlen_q=3, num_splits=2),
}
SPARE = 3  # blocks of the cache that no sequence has


def starts(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int()


def new_cache(case: Case, num_blocks: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Two caches [num_blocks, block_size, K, H] full of NaN, in strides that engines have."""
    size = (case.block_size, case.num_kv_heads, case.head_dim)
    if not case.heads_first:
        both = torch.full((num_blocks, 2, *size), torch.nan, dtype=dtype)
        return both[:, 0], both[:, 1]
    both = torch.full((num_blocks, size[1], size[0], 2 * size[2]), torch.nan, dtype=dtype).transpose(1, 2)
    return both[..., : size[2]], both[..., size[2] :]


def make(case: Case, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """q, caches, table, boundaries and lengths. Blocks are in random order; what no sequence holds is NaN."""
    generator = torch.Generator().manual_seed(0)
    used = [-(-n // case.block_size) for n in case.keys]
    num_blocks = sum(used) + SPARE
    order = torch.randperm(num_blocks, generator=generator).tolist()
    k_cache, v_cache = new_cache(case, num_blocks, dtype)
    # Entries after the last block name no block at all.
    table = torch.full((len(used), max(used) + 2), 2**30, dtype=torch.int32)
    shared = [order.pop() for _ in range(case.shared)]
    for i, num_keys in enumerate(case.keys):
        blocks = (shared + [order.pop() for _ in range(used[i] - case.shared)])[: used[i]]
        table[i, : used[i]] = torch.tensor(blocks, dtype=torch.int32)
        k, v = (torch.randn(num_keys, case.num_kv_heads, case.head_dim, generator=generator) for _ in range(2))
        if case.opposed:
            k[1::2], v[1::2] = k[: num_keys // 2 * 2 : 2], -v[: num_keys // 2 * 2 : 2]
        for j in range(num_keys):
            slot = blocks[j // case.block_size], j % case.block_size
            if k_cache[slot].isnan().any():  # else another sequence shares it
                key = (k[j].abs() if case.std < 0 else k[j]) * (-50 if j < case.huge_keys else 1)
                k_cache[slot], v_cache[slot] = key.to(dtype), v[j].to(dtype)
    num_tokens, size = sum(case.queries), (case.num_heads, case.head_dim)
    q = torch.full((num_tokens + case.padding, size[0], size[1] + 8), torch.nan, dtype=dtype)[..., : size[1]]
    drawn = torch.randn(num_tokens, *size, generator=generator)
    q[:num_tokens] = (case.std * (drawn.abs() / case.head_dim if case.std < 0 else drawn)).to(dtype)
    return q, k_cache, v_cache, table, starts(case.queries), torch.tensor(case.keys, dtype=torch.int32)


def fill_with_nan() -> None:
    """Makes torch.empty return NaN, so that results and scratch that no kernel wrote are seen."""
    empty = torch.empty
    torch.empty = lambda *args, **kwargs: empty(*args, **kwargs).fill_(torch.nan)


def run(case: Case, dtype: torch.dtype, skip_below: float = 0.0) -> dict[str, object]:
    inputs = make(case, dtype)
    q, k_cache, v_cache, *layout = inputs
    scale = 0.3 if case.head_dim == 16 else case.head_dim**-0.5
    longest = case.max_seqlen_q or q.shape[0]
    most = case.max_seqlen_k or max(case.keys)
    limits = (longest, most, scale, skip_below, case.remainder)
    out = torch.empty(q.shape, dtype=dtype)
    with patch.object(paged_launch, "SPLIT_ROWS", case.split_rows):
        ours = paged_launch.paged(*inputs, *limits, num_splits=case.num_splits, out=out)
    o, rest = (x[: sum(case.queries)] for x in ours)
    exact, exact_rest = paged_reference(
        q.double(), k_cache.double(), v_cache.double(), *layout, scale, remainder=case.remainder
    )
    same, same_rest = paged_reference(*inputs, scale, remainder=case.remainder)
    exact, exact_rest, same, same_rest = (x[: sum(case.queries)] for x in (exact, exact_rest, same, same_rest))
    values = v_cache.double().nan_to_num(0)
    return {
        name: (
            (a.double() - e).abs().max().nan_to_num(torch.inf).item(),
            (s.double() - e).abs().max().item(),
            e.abs().max().item(),
        )
        for name, a, s, e in (("o", o, same, exact), ("log_rest", rest, same_rest, exact_rest))
    } | {
        "allowed": 2 * skip_below * values.abs().max().item(),
        "rest_is_upper_bound": bool((rest.double() >= exact_rest - 1e-3 * exact_rest.abs() - 1e-3).all()),
        "skipped": bool((rest.double() > 0.5 * exact_rest).any()),
        "padding_untouched": bool(torch.cat([x[sum(case.queries) :].isnan().flatten() for x in ours]).all()),
        "in_out": ours[0].data_ptr() == out.data_ptr(),
    }


if __name__ == "__main__":
    hasten()
    dtype = getattr(torch, sys.argv[1])
    only = sys.argv[2:]
    assert triton.knobs.runtime.interpret
    fill_with_nan()
    repair_bfloat16()
    for name, case in (CASES | SKIPPING).items():
        if not only or name in only:
            skip_below = 2**-12 if name in SKIPPING else 0.0
            print(json.dumps({"case": f"{name}-{dtype}"} | run(case, dtype, skip_below)), flush=True)
