"""Loader speed: `python -m ssscale.data.benchmark FOLDER` compares our loader with a bare StreamingDataLoader.

Both read the training rows of the folder's largest source from decompressed shards, alternately, with the same number of
workers. Our loader yields `Batch`es with labels, positions and boundaries; the other one only stacks the tokens.
"""

import argparse
import time
from collections.abc import Iterable, Iterator
from itertools import islice
from statistics import median
from typing import Any

import numpy as np
import psutil
import torch

from ssscale.data.stream import PackedData, make_loader
from ssscale.data.streaming_patches import import_streaming

MICROBATCH = 4


def ours(data: PackedData, source: str, rows: int, workers: int) -> Iterator[Any]:
    arguments = {"seed": 0, "first_sample": 0, "num_samples": rows, "batch_size": MICROBATCH, "microbatch": MICROBATCH}
    return make_loader(data, mixes=[(0, {source: 1.0})], num_workers=workers, **arguments)  # type: ignore[arg-type]


def bare(data: PackedData, source: str, rows: int, workers: int) -> Iterator[Any]:
    import_streaming()
    from streaming import StreamingDataLoader, StreamingDataset

    dataset = StreamingDataset(
        local=str(data.stores[source].folder), shuffle=True, batch_size=MICROBATCH, num_canonical_nodes=1
    )
    loader = StreamingDataLoader(dataset, batch_size=MICROBATCH, num_workers=workers, collate_fn=_stack)
    return islice(loader, rows // MICROBATCH)


def _stack(samples: list[dict[str, np.ndarray]]) -> torch.Tensor:
    return torch.from_numpy(np.stack([sample["tokens"] for sample in samples]).astype(np.int64))


def speed(batches: Iterable[Any], tokens: int, num_batches: int) -> tuple[float, float]:
    """Returns tokens per second and tokens per second of CPU time.

    Timing starts after the first batch, so that the start of the workers is not counted.
    """
    iterator = iter(batches)
    next(iterator)
    began, used = time.perf_counter(), cpu_seconds()
    # Stop before the last batch: with it the workers exit, and their CPU time can no longer be read.
    for _ in islice(iterator, num_batches - 2):
        pass
    done = (num_batches - 2) * tokens
    return done / (time.perf_counter() - began), done / (cpu_seconds() - used)


def cpu_seconds() -> float:
    """Returns the CPU time that this process and its workers have used."""
    this = psutil.Process()
    times = [process.cpu_times() for process in (this, *this.children(recursive=True))]
    return sum(t.user + t.system for t in times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    data = PackedData.open(args.folder)
    source = max(data.sources, key=lambda name: data.sources[name])
    rows = data.sources[source] // MICROBATCH * MICROBATCH
    for _ in data.rows():  # decompresses every shard before the timing
        pass
    found: dict[str, list[tuple[float, float]]] = {"ours": [], "StreamingDataLoader": []}
    for _ in range(args.rounds):
        for name, make in (("ours", ours), ("StreamingDataLoader", bare)):
            batches = make(data, source, rows, args.workers)
            found[name].append(speed(batches, MICROBATCH * data.length, rows // MICROBATCH))
    print(f"{rows:,} rows of {data.length:,} tokens, {args.workers} workers: tokens a second (a CPU second), medians")
    for name, speeds in found.items():
        wall, cpu = (median(column) for column in zip(*speeds))
        print(f"{name:20} {wall:>14,.0f} ({cpu:,.0f})  best {max(wall for wall, _ in speeds):,.0f}")


if __name__ == "__main__":
    main()
