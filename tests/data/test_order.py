"""The order of samples: exact shares, every row once an epoch, shard-local, and a function of its arguments alone."""

from collections import Counter, defaultdict
from itertools import accumulate

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ssscale.data.order import BLOCK, WINDOW, Order
from ssscale.errors import UserError

SHARDS = {"a": [7, 8, 9, 3, 2, 1, 5, 6, 6], "b": [10, 11], "c": [4]}


def test_known_answer():
    """The order is part of the checkpoint's meaning: a change of it breaks every run's resume."""
    order = Order(SHARDS, [(0, {"a": 0.5, "b": 0.3, "c": 0.2})], seed=1)
    expected = [(2, 0, 3), (2, 0, 1), (0, 0, 43), (1, 0, 14), (1, 0, 0), (0, 0, 42), (0, 0, 32), (0, 0, 1)]
    assert [tuple(order[k]) for k in range(8)] == expected


@pytest.mark.parametrize("mix", [{"a": 0.5, "b": 0.3, "c": 0.2}, {"a": 1, "b": 0.001}, None])
def test_each_block_keeps_the_shares(mix):
    order = Order(SHARDS, [(0, mix)], seed=0)
    weights = mix or {"a": 47, "b": 21, "c": 4}
    shares = [weights.get(name, 0) / sum(weights.values()) for name in SHARDS]
    seen: Counter[int] = Counter()
    for k in range(10_000):
        seen[order[k].source] += 1
        if (k + 1) % BLOCK == 0:
            assert all(abs(seen[s] - share * (k + 1)) <= 1 for s, share in enumerate(shares))
            assert order.taken(k + 1) == tuple(seen[s] for s in range(3))


@settings(max_examples=25, deadline=None)
@given(
    shards=st.lists(st.lists(st.integers(1, 20), min_size=1, max_size=12), min_size=1, max_size=4),
    seed=st.integers(0, 9),
    changes=st.lists(st.integers(1, 700), max_size=3, unique=True),
    data=st.data(),
)
def test_every_epoch_holds_every_row_once(shards, seed, changes, data):
    named = {f"s{i}": rows for i, rows in enumerate(shards)}
    shares = st.one_of(st.none(), st.fixed_dictionaries({name: st.floats(0.01, 1) for name in named}))
    mixes = [(first, data.draw(shares)) for first in [0, *sorted(changes)]]
    order = Order(named, mixes, seed)
    epochs = defaultdict(list)
    last: dict[int, int] = {}
    for k in range(900):
        sample = order[k]
        assert last.get(sample.source, 0) <= sample.epoch
        last[sample.source] = sample.epoch
        epochs[sample.source, sample.epoch].append(sample.row)
    for (source, epoch), rows in epochs.items():
        total = sum(shards[source])
        assert len(set(rows)) == len(rows) <= total
        assert set(rows) <= set(range(total))
        if epoch < last[source]:
            assert len(rows) == total


def test_random_access_equals_reading_on():
    mixes = [(0, None), (300, {"a": 1}), (777, {"b": 2, "c": 1})]
    forward = Order(SHARDS, mixes, seed=3)
    samples = [forward[k] for k in range(2000)]
    for k in (1999, 0, 776, 777, 300, 299, 1024, 555):
        assert Order(SHARDS, mixes, seed=3)[k] == samples[k]
    assert [s.source for s in samples[300:777]] == [0] * 477
    assert {s.source for s in samples[777:]} == {1, 2}
    other = Order(SHARDS, mixes, seed=4)
    assert samples != [other[k] for k in range(2000)]


def test_a_later_mix_changes_nothing_before_it():
    one = Order(SHARDS, [(0, None)], seed=3)
    two = Order(SHARDS, [(0, None), (500, {"a": 0.1, "c": 0.9})], seed=3)
    assert [one[k] for k in range(500)] == [two[k] for k in range(500)]
    assert [one[k] for k in range(500, 600)] != [two[k] for k in range(500, 600)]


def test_rows_come_from_few_shards_at_a_time():
    """So that a remote set larger than the disk streams."""
    rows = [5] * 100
    order = Order({"a": rows}, [(0, None)], seed=0)
    shards = [order[k].row // 5 for k in range(500)]
    for first in range(0, 500, 5 * WINDOW):
        assert len(set(shards[first : first + 5 * WINDOW])) == WINDOW
    starts = list(accumulate(rows))
    assert shards[:20] != sorted(shards[:20]), starts


@pytest.mark.parametrize(
    ("mix", "sentence"),
    [
        ({"a": 1, "z": 1}, "names 'z', which is not a source of the data \\(a, b, c\\)"),
        ({"a": -1}, "gives 'a' the share -1"),
        ({"a": float("nan")}, "gives 'a' the share nan"),
        ({"a": 0}, "no source a share above 0"),
        ({}, "no source a share above 0"),
    ],
)
def test_bad_mixes(mix, sentence):
    with pytest.raises(UserError, match=sentence):
        Order(SHARDS, [(0, mix)], seed=0)
