"""Stopped anywhere and resumed on another layout, a run reads the samples it would have read, in the same order."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ssscale.data.order import Mix, Order, Sample
from ssscale.data.stream import PackedData, _Plan, make_loader
from tests.data.conftest import LENGTH

STEPS = 6
SHARDS = {"a": [5, 4, 6, 5, 3, 5, 1], "b": [9, 8], "c": [4]}  # c has few rows: its epochs end within a step


@dataclass(frozen=True)
class Layout:
    """Ranks, loader workers a rank, rows a microbatch."""

    ranks: int
    workers: int
    microbatch: int


@st.composite
def layouts(draw: st.DrawFn, batch_size: int) -> Layout:
    ranks = draw(st.sampled_from([n for n in range(1, 9) if batch_size % n == 0]))
    share = batch_size // ranks
    microbatch = draw(st.sampled_from([n for n in range(1, share + 1) if share % n == 0]))
    return Layout(ranks, draw(st.integers(0, 4)), microbatch)


MIXES = st.one_of(st.none(), st.fixed_dictionaries({name: st.floats(0.05, 1) for name in SHARDS}))


def samples_of(
    mixes: list[tuple[int, Mix]], seed: int, batch_size: int, layout: Layout, first_step: int, last_step: int
) -> list[Sample]:
    """What the ranks' workers read, each with an order of its own, in the global order of samples."""
    # A loader gives microbatch i to worker i mod workers, and the training takes them in order.
    orders = {
        (rank, worker): Order(SHARDS, mixes, seed)
        for rank in range(layout.ranks)
        for worker in range(max(layout.workers, 1))
    }
    plans = [
        _Plan(first_step * batch_size, batch_size, layout.microbatch, rank, layout.ranks)
        for rank in range(layout.ranks)
    ]
    found = []
    for number in range((last_step - first_step) * plans[0].accumulation):
        for rank, plan in enumerate(plans):
            order = orders[rank, number % max(layout.workers, 1)]
            found += [order[k] for k in plan.samples(number)]
    return found


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data(), seed=st.integers(0, 99), batch_size=st.sampled_from([8, 12, 24, 30, 35, 42, 56]))
def test_200_resumed_runs(data: st.DataObject, seed: int, batch_size: int) -> None:
    stops = sorted(data.draw(st.sets(st.integers(1, STEPS - 1), min_size=1, max_size=2)))
    change = data.draw(st.integers(1, STEPS * batch_size - 1))
    mixes: list[tuple[int, Mix]] = [(0, data.draw(MIXES)), (change, data.draw(MIXES))]
    whole = Order(SHARDS, mixes, seed)
    expected = [whole[k] for k in range(STEPS * batch_size)]
    found: list[Sample] = []
    for first, last in zip([0, *stops], [*stops, STEPS]):
        found += samples_of(mixes, seed, batch_size, data.draw(layouts(batch_size)), first, last)
    assert found == expected
    # None skipped, none repeated: each source's samples run through its epochs, every row once in each.
    for source, rows in enumerate(map(sum, SHARDS.values())):
        epochs = [sample.epoch for sample in expected if sample.source == source]
        assert epochs == [number // rows for number in range(len(epochs))]


@pytest.mark.parametrize(
    ("stop", "before", "after"),
    [
        (1, Layout(1, 2, 8), Layout(8, 0, 3)),
        (4, Layout(6, 1, 2), Layout(3, 1, 8)),
        (5, Layout(2, 0, 12), Layout(1, 4, 4)),
    ],
)
def test_real_loaders(folder: Path, stop: int, before: Layout, after: Layout) -> None:
    batch_size, steps = 24, 10
    mixes: list[tuple[int, Mix]] = [(0, None), (100, {"a": 0.5, "b": 0.3, "c": 0.2})]

    def rows(layout: Layout, first: int, last: int) -> list[bytes]:
        loaders = [
            make_loader(
                PackedData.open(str(folder)),
                mixes=mixes,
                seed=3,
                first_sample=first * batch_size,
                num_samples=(last - first) * batch_size,
                batch_size=batch_size,
                microbatch=layout.microbatch,
                rank=rank,
                world_size=layout.ranks,
                num_workers=layout.workers,
                timeout=120,
            )
            for rank in range(layout.ranks)
        ]
        found = []
        for ranks in zip(*loaders):
            for microbatches in zip(*ranks):
                found += [row.tobytes() for batch in microbatches for row in batch.tokens.numpy().reshape(-1, LENGTH)]
        return found

    data = PackedData.open(str(folder))
    order = Order({name: store.shard_rows for name, store in data.stores.items()}, mixes, 3)
    samples = [order[k] for k in range(steps * batch_size)]
    expected = [data.row(sample.source, sample.row).tokens.astype(np.int64).tobytes() for sample in samples]
    assert rows(before, 0, stop) + rows(after, stop, steps) == expected
