"""python -m ssscale_kernels.stickbreaking.paged_benchmark: checks the paged kernels, then times them next to the
contiguous ones.

Needs a CUDA GPU. Ends with exit code 1 if a result is wrong, or if decoding takes over 1.10 times as long as without
blocks. Expected to take less than 4 minutes, most of them compiling.
"""

import argparse
import itertools
import json
import sys
import time
from collections.abc import Callable
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton
from ssscale_kernels.stickbreaking import paged_launch
from ssscale_kernels.stickbreaking.benchmark import graph_ms, starts
from ssscale_kernels.stickbreaking.decode import decode
from ssscale_kernels.stickbreaking.forward import Config, forward
from ssscale_kernels.stickbreaking.paged import paged_stickbreaking
from ssscale_kernels.stickbreaking.paged_launch import paged
from ssscale_kernels.stickbreaking.paged_reference import paged_reference
from torch import Tensor

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 24, 8, 64
BLOCK_SIZES = (16, 64)
LENGTHS, BATCHES = (1024, 4096, 16384, 65536, 131072), (1, 32)
CHUNK, BEHIND = 2048, (16384, 65536)
SKIP_BELOW = 2**-12
ALLOWED = 1.10  # decoding, in multiples of the contiguous kernel
DEVICE = "cuda"
# (dtype, head dim, block size, remainder); each takes three compilations.
CHECKS = [
    (torch.bfloat16, 64, 16, True),
    (torch.bfloat16, 64, 64, False),
    (torch.bfloat16, 128, 16, False),
    (torch.bfloat16, 80, 32, True),
    (torch.float16, 64, 16, False),
    (torch.float16, 128, 128, True),
    (torch.float32, 64, 16, True),
    (torch.float32, 128, 64, False),
]
QUERIES, KEYS = [1, 0, 300, 3, 129, 1, 5], [1000, 0, 700, 3, 4000, 64, 2500]

Batch = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


def page(k: Tensor, v: Tensor, keys: list[int], block_size: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns caches [blocks, block_size, K, H], table and lengths for packed k and v.

    As in vLLM, k and v of a token are side by side. Blocks are in random order.
    Slots without a key are NaN, and table entries without a block name none that exists.
    """
    used = [triton.cdiv(n, block_size) for n in keys]
    order = torch.randperm(sum(used) + 3, device=k.device)
    shape = (len(order), block_size, k.shape[1], 2 * k.shape[2])
    cache = torch.full(shape, torch.nan, dtype=k.dtype, device=k.device)
    caches = cache.split(k.shape[2], -1)
    table = torch.full((len(keys), max(used)), 2**30, dtype=torch.int32, device=k.device)
    key = block = 0
    for i, num_keys in enumerate(keys):
        blocks = order[block : block + used[i]]
        table[i, : used[i]] = blocks
        for x, part in zip((k, v), caches):
            rows = x.new_full((used[i] * block_size, *x.shape[1:]), torch.nan)
            rows[:num_keys] = x[key : key + num_keys]
            part[blocks] = rows.unflatten(0, (-1, block_size))
        key, block = key + num_keys, block + used[i]
    return *caches, table, torch.tensor(keys, dtype=torch.int32, device=k.device)


def make(num_tokens: int, num_heads: int, head_dim: int, kind: str, keys: bool = False) -> Tensor:
    """Returns [T, N, H] in float32. kind: "spent" is unit normal; "dense" are logits so low that no stick is spent."""
    x = torch.randn(num_tokens, num_heads, head_dim, device=DEVICE)
    if kind == "dense":
        return -1.5 * (64 / head_dim) ** 0.5 * (1 + x.abs() / 2) if keys else 1 + x.abs() / 2
    return 30 * x if kind == "huge" and not keys else x


def check_batch(dtype: torch.dtype, head_dim: int, block_size: int, kind: str) -> Batch:
    torch.manual_seed(0)
    q = make(sum(QUERIES), 6, head_dim, kind).to(dtype)
    k, v = (make(sum(KEYS), 2, head_dim, kind, keys=True).to(dtype) for _ in range(2))
    k_cache, v_cache, table, lengths = page(k, v, KEYS, block_size)
    boundaries = torch.tensor([0, *itertools.accumulate(QUERIES)], dtype=torch.int32, device=DEVICE)
    return q, k_cache, v_cache, table, boundaries, lengths


def check() -> list[dict[str, Any]]:
    """Checks results against float64. Returns the worst errors in units of twice those of plain torch."""
    found = []
    for dtype, head_dim, block_size, remainder in CHECKS:
        worst = 0.0
        for kind in ("spent", "dense", "huge"):
            batch = check_batch(dtype, head_dim, block_size, kind)
            exact = paged_reference(*(x.double() if x.is_floating_point() else x for x in batch), remainder=remainder)
            plain = paged_reference(*batch, remainder=remainder)
            for skip_below in (0.0, SKIP_BELOW):
                ours = paged_stickbreaking(*batch, skip_below=skip_below, remainder=remainder)
                again = paged_stickbreaking(*batch, skip_below=skip_below, remainder=remainder)
                assert all(torch.equal(a, b) for a, b in zip(ours, again)), "two runs differ"
                # log_rest of a skipped stick is a bound only.
                for a, p, e in list(zip(ours, plain, exact))[: 2 if skip_below == 0 else 1]:
                    error, allowed, size = (x.abs().max().item() for x in (a.double() - e, p.double() - e, e))
                    share = error / (2 * allowed + (1e-5 + 2 * skip_below) * max(size, 1.0))
                    worst = max(worst, share if share == share else float("inf"))
        case = f"{dtype}, {head_dim} dims, blocks of {block_size}, remainder {remainder}"
        verdict = "ok" if worst <= 1 else "OVER BUDGET"
        print(f"{verdict}: {case}: worst error {worst:.2f} of what is allowed", flush=True)
        found.append({"case": case, "error": worst})
    return found


def check_graph() -> bool:
    """One captured graph serves other lengths and blocks; nothing waits for the GPU."""
    first, second = (check_batch(torch.bfloat16, 64, 16, kind) for kind in ("spent", "dense"))
    swapped = [0, *itertools.accumulate(QUERIES[::-1])]
    second[4].copy_(torch.tensor(swapped, dtype=torch.int32))
    second[3].copy_(second[3].flip(0))
    second[5].copy_(second[5].flip(0))
    call = partial(paged_stickbreaking, remainder=True)
    wanted = call(*second)
    torch.cuda.set_sync_debug_mode("error")
    call(*first)
    torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = call(*first)
    for a, b in zip(first, second):
        a.copy_(b)
    graph.replay()
    torch.cuda.synchronize()
    equal = all(torch.equal(a, b) for a, b in zip(found, wanted))
    print(f"{'ok' if equal else 'WRONG'}: a CUDA graph replayed with other lengths", flush=True)
    return equal


def inputs(batch: int, length: int, kind: str) -> tuple[Tensor, Tensor]:
    """Returns k and v [batch · length, K, H] in bf16, made in slices because float32 takes twice the memory."""
    rows = [length] * batch
    k, v = (torch.cat([make(n, NUM_KV_HEADS, HEAD_DIM, x, True).bfloat16() for n in rows]) for x in (kind, "spent"))
    return k, v


def compare(batch: int, num_queries: int, length: int) -> list[dict[str, Any]]:
    """Prints one row of the table: µs of the contiguous kernel, and of the paged ones in its multiples. Returns these."""
    cells, rows = [], []
    for kind in ("dense", "spent"):
        q = make(batch * num_queries, NUM_HEADS, HEAD_DIM, kind).bfloat16()
        k, v = inputs(batch, length, kind)
        cu_q, cu_k = starts(batch, num_queries), starts(batch, length)
        offsets = torch.full((batch,), length - num_queries, dtype=torch.int32, device=DEVICE)
        before = (q, k, v, cu_q, cu_k, offsets, None)
        contiguous: Callable[[], tuple[Tensor, ...]]
        if num_queries == 1:
            contiguous = partial(decode, *before, 1, length, HEAD_DIM**-0.5, SKIP_BELOW)
        else:
            contiguous = partial(forward, *before, length, HEAD_DIM**-0.5, SKIP_BELOW, max_queries=num_queries)
        calls = 8 if num_queries == 1 else 2
        usual = graph_ms([contiguous] * calls, 40)
        expected = contiguous()[0].float()
        cells.append(f"{1e3 * usual:.1f}")
        for block_size in BLOCK_SIZES:
            k_cache, v_cache, table, lengths = page(k, v, [length] * batch, block_size)
            call = partial(
                paged, q, k_cache, v_cache, table, cu_q, lengths, num_queries, length, HEAD_DIM**-0.5, SKIP_BELOW, False
            )
            error = (call()[0].float() - expected).abs().max().item()
            assert error <= 0.02 * max(1.0, expected.abs().max().item()), f"differs from contiguous by {error}"
            took = graph_ms([call] * calls, 40)
            cells.append(f"{1e3 * took:.1f} ({took / usual:.2f})")
            case = {"queries": num_queries, "batch": batch, "keys": length, "kind": kind, "block_size": block_size}
            rows.append(case | {"contiguous_us": 1e3 * usual, "paged_us": 1e3 * took, "ratio": took / usual})
            del k_cache, v_cache, call
    print(f"| {num_queries:,} × {batch}, {length:,} | " + " | ".join(cells) + " |", flush=True)
    return rows


def tune() -> None:
    """Prints µs of decoding 131,072 and 4,096 dense keys, batch 1 and 32, for other launch settings."""
    for batch, length in ((1, 131072), (32, 4096), (32, 65536)):
        q = make(batch, NUM_HEADS, HEAD_DIM, "dense").bfloat16()
        k, v = inputs(batch, length, "dense")
        k_cache, v_cache, table, lengths = page(k, v, [length] * batch, 16)
        arguments = (q, k_cache, v_cache, table, starts(batch, 1), lengths, 1, length, HEAD_DIM**-0.5, 0.0, False)
        for key_block, warps, stages, registers in itertools.product((64, 128), (2, 4), (2, 3, 4), (None, 168)):
            config = Config(16, key_block, warps, stages, registers)
            times = {}
            for factor in (1, 2):
                splits = factor * paged_launch.default_splits(length, NUM_KV_HEADS, batch)
                times[splits] = 1e3 * graph_ms([partial(paged, *arguments, splits, split=config)] * 4, 20)
            print(batch, length, config, {n: round(t, 1) for n, t in times.items()}, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tune", action="store_true", help="rank launch settings of decoding instead")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write all figures there, as JSON")
    arguments = parser.parse_args()
    began = time.perf_counter()
    versions = f"torch {torch.__version__}, Triton {triton.__version__}"
    print(f"{date.today()}, {torch.cuda.get_device_name()}, {versions}")
    if arguments.tune:
        tune()
        return
    checks, graph = check(), check_graph()
    print(f"checked after {time.perf_counter() - began:.0f} s; times in µs, in brackets as multiples of contiguous")
    times = measure()
    decodes = [row for row in times if row["queries"] == 1]
    slow = [row for row in decodes if row["ratio"] > ALLOWED]
    wrong = [row for row in checks if not row["error"] <= 1]
    print(f"{len(decodes) - len(slow)} of {len(decodes)} decodes within {ALLOWED:.2f} of contiguous")
    print(f"took {time.perf_counter() - began:.0f} s")
    if arguments.out:
        result = {"date": str(date.today()), "device": torch.cuda.get_device_name(), "versions": versions}
        result |= {"checks": checks, "graph": graph, "times": times, "seconds": time.perf_counter() - began}
        arguments.out.write_text(json.dumps(result, indent=1), encoding="utf-8")
    sys.exit(1 if wrong or slow or not graph else 0)


def measure() -> list[dict[str, Any]]:
    names = ["contiguous", *(f"blocks of {n}" for n in BLOCK_SIZES)]
    kinds = [f"{kind}, {name}" for kind in ("dense", "spent") for name in names]
    print(f"| queries × batch, keys | {' | '.join(kinds)} |\n|{'---|' * (1 + len(kinds))}")
    times = []
    for length, batch in itertools.product(LENGTHS, BATCHES):
        times += compare(batch, 1, length)
    for behind in BEHIND:
        times += compare(1, CHUNK, behind + CHUNK)
    return times


if __name__ == "__main__":
    main()
