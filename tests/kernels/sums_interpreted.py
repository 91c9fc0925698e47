"""Runs the kernel of sums under Triton's interpreter, in a process of its own. Prints one JSON object per case."""

import json

import torch
import triton
from ssscale_kernels.sums import BLOCK, sum_in_order, sum_kernel

from tests.kernels.interpreted import repair_bfloat16


def run(ranks: int, size: int, dtype: torch.dtype, to: torch.dtype, in_place: bool) -> bool:
    """Whether the kernel gives the bits of torch, and leaves what comes after the sum alone."""
    generator = torch.Generator().manual_seed(ranks + size)
    parts = [torch.randn(size, generator=generator).to(dtype) for _ in range(ranks)]
    expected, memory = torch.empty(size, dtype=to), torch.full((size + 3,), 7, dtype=to)
    sum_in_order(parts, expected)
    out = parts[-1] if in_place else memory[:size]
    sum_kernel[(triton.cdiv(size, BLOCK),)](tuple(parts), out, size, BLOCK=BLOCK)
    return torch.equal(out, expected) and bool((memory[size:] == 7).all())


if __name__ == "__main__":
    repair_bfloat16()
    bf16, fp32 = torch.bfloat16, torch.float32
    for ranks, size in ((2, 1), (2, 5000), (3, BLOCK), (8, BLOCK + 1)):
        found = {
            "fp32": run(ranks, size, bf16, fp32, False),
            "rounded": run(ranks, size, bf16, bf16, True),
            "of fp32": run(ranks, size, fp32, fp32, True),
        }
        print(json.dumps({"case": f"{ranks}×{size}"} | found))
