"""python -m ssscale_kernels.stickbreaking.paged_benchmark: checks the paged kernels, then times them next to the
contiguous ones.

Needs a CUDA GPU. Ends with exit code 1 if a result is wrong, or if decoding takes over 1.10 times as long as without
blocks. Kernels are compiled and checked by several processes at once; times are measured by one, afterwards.
"""

import argparse
import itertools
import json
import math
import multiprocessing
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from ssscale_kernels.gpu import require_gpu
from ssscale_kernels.stickbreaking import paged_launch
from ssscale_kernels.stickbreaking.benchmark import graph_ms, starts
from ssscale_kernels.stickbreaking.decode import decode
from ssscale_kernels.stickbreaking.forward import forward
from ssscale_kernels.stickbreaking.paged import paged_stickbreaking
from ssscale_kernels.stickbreaking.paged_launch import Form, paged
from ssscale_kernels.stickbreaking.paged_reference import paged_reference
from ssscale_kernels.stickbreaking.settings import Config
from torch import Tensor

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 24, 8, 64
BLOCK_SIZES = (16, 64)
LENGTHS, BATCHES = (1024, 4096, 16384, 65536, 131072), (1, 32)
CHUNK, BEHIND = 2048, (16384, 65536)
SKIP_BELOW = 2**-12
ALLOWED = 1.10  # decoding, in multiples of the contiguous kernel
DEVICE = "cuda"
# (dtype, head dim, block size, remainder); each takes five compilations.
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


class Candidate(NamedTuple):
    """Other settings of decoding. splits: in multiples of the usual number."""

    form: Form = Form()
    config: Config | None = None
    splits: float = 1.0


# Measured with --candidates. No loop over tiles of these spills.
CANDIDATES = {
    "as chosen": Candidate(),
    "first chunk of 1": Candidate(Form(first_chunk=1)),
    "first chunk of 4": Candidate(Form(first_chunk=4)),
    "merge after splits": Candidate(Form(early=False)),
    "half the splits": Candidate(splits=0.5),
    "4/3 of the splits": Candidate(splits=1.33),
    "twice the splits": Candidate(splits=2.0),
    "3 stages": Candidate(config=Config(16, 64, 1, 3)),
    "3 stages, twice the splits": Candidate(config=Config(16, 64, 1, 3), splits=2.0),
}
PREFILLS = {
    "2 stages": Config(64, 64, 4, 2, 168),
    "4 stages": Config(64, 64, 4, 4, 168),
    "no limit of registers": Config(64, 64, 4, 3),
    "128 rows, 8 warps": Config(128, 64, 8, 3),
}
Row = dict[str, Any]
Results = tuple[Tensor, Tensor]
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


def worst_share(ours: Results, plain: Results, exact: Results, skip_below: float) -> float:
    """Returns the largest error in units of twice that of plain torch."""
    worst = 0.0
    # log_rest of a skipped stick is a bound only.
    for a, p, e in list(zip(ours, plain, exact))[: 2 if skip_below == 0 else 1]:
        error, allowed, size = (x.abs().max().item() for x in (a.double() - e, p.double() - e, e))
        share = error / (2 * allowed + (1e-5 + 2 * skip_below) * max(size, 1.0))
        worst = max(worst, share if share == share else float("inf"))
    return worst


def check(dtype: torch.dtype, head_dim: int, block_size: int, remainder: bool) -> Row:
    """Checks results against float64. Returns the worst error in units of twice that of plain torch."""
    worst = 0.0
    for kind in ("spent", "dense", "huge"):
        batch = check_batch(dtype, head_dim, block_size, kind)
        exact = paged_reference(*(x.double() if x.is_floating_point() else x for x in batch), remainder=remainder)
        plain = paged_reference(*batch, remainder=remainder)
        for skip_below, splits in itertools.product((0.0, SKIP_BELOW), (None, 1, 7)):
            limits = (len(batch[0]), max(KEYS), head_dim**-0.5, skip_below, remainder)
            ours, again = (paged(*batch, *limits, splits) for _ in range(2))
            assert all(torch.equal(a, b) for a, b in zip(ours, again)), "two runs differ"
            worst = max(worst, worst_share(ours, plain, exact, skip_below))
    case = f"{dtype}, {head_dim} dims, blocks of {block_size}, remainder {remainder}"
    verdict = "ok" if worst <= 1 else "OVER BUDGET"
    print(f"{verdict}: {case}: worst error {worst:.2f} of what is allowed", flush=True)
    return {"case": case, "error": worst}


def check_graph() -> bool:
    """One captured graph serves other lengths and blocks; nothing waits for the GPU; the merge waits for the splits."""
    first, second = (check_batch(torch.bfloat16, 64, 16, kind) for kind in ("spent", "dense"))
    swapped = [0, *itertools.accumulate(QUERIES[::-1])]
    second[4].copy_(torch.tensor(swapped, dtype=torch.int32))
    second[3].copy_(second[3].flip(0))
    second[5].copy_(second[5].flip(0))
    call = partial(paged_stickbreaking, remainder=True)
    limits = (len(first[0]), second[3].shape[1] * 16, 64**-0.5, SKIP_BELOW, True)
    # Here, each kernel starts when the one before has ended.
    wanted = paged(*second, *limits, form=Form(early=False))
    call(*second)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    call(*first)
    torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = call(*first)
    for a, b in zip(first, second):
        a.copy_(b)
    equal = True
    for _ in range(100):
        for x in found:
            x.fill_(torch.nan)
        graph.replay()
        equal = equal and all(torch.equal(a, b) for a, b in zip(found, wanted))
    print(f"{'ok' if equal else 'WRONG'}: a CUDA graph replayed 100 times with other lengths", flush=True)
    return equal


def warm(candidate: Candidate) -> None:
    """Compiles what `compare` runs, by running it in small."""
    q, k, v, cu_q, cu_k, offsets = layout(1, 1, 1024, "dense")
    decode(q, k, v, cu_q, cu_k, offsets, None, 1, 1024, HEAD_DIM**-0.5, SKIP_BELOW)
    for block_size, splits in itertools.product(BLOCK_SIZES, (3, 16, 99)):
        k_cache, v_cache, table, lengths = page(k, v, [1024], block_size)
        batch = (q, k_cache, v_cache, table, cu_q, lengths, 1, 1024, HEAD_DIM**-0.5, SKIP_BELOW, False)
        paged(*batch, splits, split=candidate.config, form=candidate.form)


def warm_prefill(config: Config | None) -> None:
    q, k, v, cu_q, cu_k, offsets = layout(1, 256, 1024, "dense")
    forward(q, k, v, cu_q, cu_k, offsets, None, 1024, HEAD_DIM**-0.5, SKIP_BELOW, max_queries=256)
    for block_size in BLOCK_SIZES:
        k_cache, v_cache, table, lengths = page(k, v, [1024], block_size)
        batch = (q, k_cache, v_cache, table, cu_q, lengths, 256, 1024, HEAD_DIM**-0.5, SKIP_BELOW, False)
        paged(*batch, prefill=config)


def inputs(batch: int, length: int, kind: str) -> tuple[Tensor, Tensor]:
    """Returns k and v [batch · length, K, H] in bf16, made in slices because float32 takes twice the memory."""
    rows = [length] * batch
    k, v = (torch.cat([make(n, NUM_KV_HEADS, HEAD_DIM, x, True).bfloat16() for n in rows]) for x in (kind, "spent"))
    return k, v


def layout(batch: int, num_queries: int, length: int, kind: str) -> tuple[Tensor, ...]:
    """Returns q, k, v, the boundaries of queries and keys, and the positions of the first queries."""
    q = make(batch * num_queries, NUM_HEADS, HEAD_DIM, kind).bfloat16()
    offsets = torch.full((batch,), length - num_queries, dtype=torch.int32, device=DEVICE)
    return q, *inputs(batch, length, kind), starts(batch, num_queries), starts(batch, length), offsets


def compare(batch: int, num_queries: int, length: int, candidates: bool) -> tuple[list[Row], list[Row]]:
    """Prints one row of the table: µs of the contiguous kernel, and of the paged ones in its multiples. Returns these."""
    cells, rows, others = [], [], []
    for kind in ("dense", "spent"):
        q, k, v, cu_q, cu_k, offsets = layout(batch, num_queries, length, kind)
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
            differs(call()[0], expected)
            took = graph_ms([call] * calls, 40)
            cells.append(f"{1e3 * took:.1f} ({took / usual:.2f})")
            case = {"queries": num_queries, "batch": batch, "keys": length, "kind": kind, "block_size": block_size}
            rows.append(case | {"contiguous_us": 1e3 * usual, "paged_us": 1e3 * took, "ratio": took / usual})
            if candidates:
                attempts = other_decodes(call, batch, length) if num_queries == 1 else other_prefills(call)
                others += [case | x for x in try_candidates(attempts, expected, usual)]
            del k_cache, v_cache, call
    print(f"| {num_queries:,} × {batch}, {length:,} | " + " | ".join(cells) + " |", flush=True)
    return rows, others


def differs(found: Tensor, expected: Tensor) -> None:
    error = (found.float() - expected).abs().max().item()
    assert error <= 0.02 * max(1.0, expected.abs().max().item()), f"differs from contiguous by {error}"


Calls = dict[str, tuple[int | None, Callable[[], Results]]]  # by name: the number of splits, and a call


def other_prefills(call: "partial[Results]") -> Calls:
    """Returns prefills with the settings of PREFILLS."""
    return {name: (None, partial(call, prefill=config)) for name, config in PREFILLS.items()}


def other_decodes(call: "partial[Results]", batch: int, length: int) -> Calls:
    """Returns decodes with the settings of CANDIDATES."""
    found: Calls = {}
    for name, x in CANDIDATES.items():
        config = x.config or paged_launch.split_config(16, HEAD_DIM, torch.bfloat16)
        splits = paged_launch.default_splits(length, NUM_KV_HEADS * batch, config)
        splits = max(1, min(round(x.splits * splits), triton.cdiv(length, config.key_block)))
        found[name] = (splits, partial(call, form=x.form, split=x.config, num_splits=splits))
    return found


def try_candidates(calls: Calls, expected: Tensor, usual: float) -> list[Row]:
    """Returns the multiples of the contiguous kernel's time that other settings take."""
    rows = []
    for name, (splits, call) in calls.items():
        differs(call()[0], expected)
        # The shorter ones as often as in the table, so that each finds the same in the cache.
        took = graph_ms([call] * (8 if usual < 0.1 else 2), 10)
        rows.append({"candidate": name, "splits": splits, "us": 1e3 * took, "ratio": took / usual})
    return rows


def print_candidates(times: list[Row], others: list[Row]) -> None:
    """Prints over all decodes how often each candidate was within the limit, and what each took in prefills and in the rows
    over the limit."""
    for name in CANDIDATES:
        ratios = [x["ratio"] for x in others if x["candidate"] == name and x["queries"] == 1]
        mean, within = math.exp(sum(map(math.log, ratios)) / len(ratios)), sum(x <= ALLOWED for x in ratios)
        print(
            f"{name}: {within} of {len(ratios)} decodes within {ALLOWED:.2f}, mean {mean:.3f}, worst {max(ratios):.2f}"
        )
    for row in times:
        case = {name: row[name] for name in ("queries", "batch", "keys", "kind", "block_size")}
        if row["ratio"] > ALLOWED or row["queries"] > 1:
            tried = [x for x in others if case.items() <= x.items()]
            best = ", ".join(
                f"{x['candidate']} {x['ratio']:.2f}" for x in sorted(tried, key=lambda x: float(x["ratio"]))
            )
            print(f"{list(case.values())}: {row['ratio']:.2f}; {best}")


def prepare(workers: int, candidates: bool) -> tuple[list[Row], bool]:
    """Checks results, and compiles the kernels that are timed later, in several processes. Returns what was checked."""
    settings = CANDIDATES.values() if candidates else [Candidate()]
    prefills = [None, *PREFILLS.values()] if candidates else [None]
    # Processes find each other's kernels in Triton's cache on disk.
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        checks = [pool.submit(check, *case) for case in CHECKS]
        graph = pool.submit(check_graph)
        others = [pool.submit(warm, x) for x in settings] + [pool.submit(warm_prefill, x) for x in prefills]
        for other in others:
            other.result()
        return [x.result() for x in checks], graph.result()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--candidates", action="store_true", help="also time other launch settings")
    parser.add_argument("--workers", type=int, default=8, metavar="N", help="processes that compile and check (8)")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write all figures there, as JSON")
    arguments = parser.parse_args()
    require_gpu()
    began = time.perf_counter()
    versions = f"torch {torch.__version__}, Triton {triton.__version__}"
    print(f"{date.today()}, {torch.cuda.get_device_name()}, {versions}", flush=True)
    checks, graph = prepare(arguments.workers, arguments.candidates)
    print(f"checked after {time.perf_counter() - began:.0f} s; times in µs, in brackets as multiples of contiguous")
    times, others = measure(arguments.candidates)
    decodes = [row for row in times if row["queries"] == 1]
    slow = [row for row in decodes if row["ratio"] > ALLOWED]
    wrong = [row for row in checks if not row["error"] <= 1]
    print(f"{len(decodes) - len(slow)} of {len(decodes)} decodes within {ALLOWED:.2f} of contiguous")
    if arguments.candidates:
        print_candidates(times, others)
    print(f"took {time.perf_counter() - began:.0f} s")
    if arguments.out:
        result = {"date": str(date.today()), "device": torch.cuda.get_device_name(), "versions": versions}
        result |= {"checks": checks, "graph": graph, "times": times, "candidates": others}
        arguments.out.write_text(
            json.dumps(result | {"seconds": time.perf_counter() - began}, indent=1), encoding="utf-8"
        )
    sys.exit(1 if wrong or slow or not graph else 0)


def measure(candidates: bool) -> tuple[list[Row], list[Row]]:
    names = ["contiguous", *(f"blocks of {n}" for n in BLOCK_SIZES)]
    kinds = [f"{kind}, {name}" for kind in ("dense", "spent") for name in names]
    print(f"| queries × batch, keys | {' | '.join(kinds)} |\n|{'---|' * (1 + len(kinds))}", flush=True)
    times, others = [], []
    shapes = [(batch, 1, length) for length, batch in itertools.product(LENGTHS, BATCHES)]
    for shape in [*shapes, *((1, CHUNK, behind + CHUNK) for behind in BEHIND)]:
        more = compare(*shape, candidates)
        times += more[0]
        others += more[1]
    return times, others


if __name__ == "__main__":
    main()
