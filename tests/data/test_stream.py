"""Shards to batches: the same samples on any layout, exact resume, and every fault an error that names its shard."""

import json
import os
import shutil
import time
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ssscale.data import manifest as manifests
from ssscale.data.shards import RowStore
from ssscale.data.stream import Ahead, PackedData, WorkerKilled, make_loader, valid_batches
from ssscale.errors import STALLED, UserError
from tests.data.conftest import LENGTH

MIXES = [(0, None), (96, {"a": 0.2, "b": 0.3, "c": 0.5}), (200, {"c": 1.0})]
BATCH = 24


def load(data: PackedData, **changes: object) -> list[list]:
    arguments = {"mixes": MIXES, "seed": 5, "first_sample": 0, "num_samples": 480, "batch_size": BATCH, "microbatch": 4}
    return list(make_loader(data, **(arguments | changes)))


def test_ahead_makes_one_item_early_and_raises_when_it_is_asked_for():
    made = []

    def items():
        for number in range(3):
            made.append(number)
            yield number
        raise UserError("shard 3 is broken")

    ahead = Ahead(items())
    assert next(ahead) == 0
    ahead.prepare()
    ahead.prepare()
    assert made == [0, 1]
    assert next(ahead) == 1
    assert next(ahead) == 2
    ahead.prepare()
    with pytest.raises(UserError, match="shard 3"):
        next(ahead)
    assert list(ahead) == []


@pytest.mark.gpu
def test_pinned_batches_are_equal(folder: Path):
    for batch in [batch for step in load(PackedData.open(str(folder)), num_workers=0) for batch in step][:4]:
        pinned = batch.pin_memory()
        assert pinned.tokens.is_pinned()
        assert pinned.layout.positions.is_pinned()
        for name in ("tokens", "labels", "sources"):
            assert getattr(pinned, name).equal(getattr(batch, name))
        assert pinned.layout.cu_seqlens.equal(batch.layout.cu_seqlens)


def step_tokens(steps_of_ranks: list[list[list]]) -> list[list[bytes]]:
    """The rows of each step over all ranks, in the global order."""
    steps = []
    for ranks in zip(*steps_of_ranks):
        microbatches = [batch for group in zip(*ranks) for batch in group]
        steps.append([row.tobytes() for batch in microbatches for row in batch.tokens.numpy().reshape(-1, LENGTH)])
    return steps


@settings(max_examples=12, deadline=None)
@given(
    world=st.sampled_from([1, 2, 3, 4]),
    microbatch=st.sampled_from([1, 2, 3, 6]),
    resume=st.integers(0, 19),
)
def test_same_global_order_on_any_layout(folder, world, microbatch, resume):
    if BATCH % (world * microbatch):
        microbatch = 1
    data = PackedData.open(str(folder))
    whole = step_tokens([load(data)])
    changes = {"first_sample": resume * BATCH, "num_samples": 480 - resume * BATCH, "microbatch": microbatch}
    parts = [load(PackedData.open(str(folder)), rank=r, world_size=world, **changes) for r in range(world)]
    assert step_tokens(parts) == whole[resume:]
    # Sources repeat in this run, so the epochs' ends are among the steps.
    assert sum(data.sources.values()) < 480


def test_workers_change_nothing(folder):
    data = PackedData.open(str(folder))
    alone = load(data)
    with_workers = load(data, num_workers=2, prefetch=2, timeout=60)
    assert step_tokens([alone]) == step_tokens([with_workers])
    for a, b in zip(alone, with_workers):
        assert [x.labels.tolist() for x in a] == [x.labels.tolist() for x in b]
        assert [x.sources.tolist() for x in a] == [x.sources.tolist() for x in b]


def test_rows_are_those_of_the_shards(folder):
    """Against data_prep's own reader, which shares no code with this one."""
    from data_prep.read_shards import read_shard, shards

    data = PackedData.open(str(folder))
    for source in data.sources:
        number = 0
        for shard in shards(str(folder), "train", source):
            for sample in read_shard(str(folder), "train", source, shard):
                row = data.row(source, number)
                assert all(np.array_equal(getattr(row, name), sample[name]) for name in row._fields)
                number += 1
        assert number == data.sources[source]
    assert sum(1 for _ in data.rows()) == sum(data.sources.values())


def test_the_mix_changes_at_its_sample(folder):
    data = PackedData.open(str(folder))
    sources = [s for step in load(data) for batch in step for s in batch.sources.tolist()]
    assert set(sources[200:]) == {data.names.index("c")}
    assert set(sources[:200]) == {0, 1, 2}


def test_random_numbers_are_not_drawn(folder):
    import torch

    before = torch.random.get_rng_state()
    load(PackedData.open(str(folder)), num_workers=1)
    assert torch.random.get_rng_state().equal(before)


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("fault", ["flip", "cut", "gone"])
def test_a_broken_shard_is_named(copy, workers, fault):
    file = sorted(copy.glob("train/a/*.zstd"))[1]
    data = PackedData.open(str(copy))
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content[:100] if fault == "cut" else content)
    if fault == "gone":
        file.unlink()
    with pytest.raises(
        UserError, match=f"rank 0: shard .*train/a/{file.name} is missing or corrupt|{file.name} is missing"
    ):
        load(data, num_workers=workers, timeout=60)
    if fault != "flip":
        with pytest.raises(UserError, match=f"shard .*{file.name} is missing or of the wrong size"):
            PackedData.open(str(copy))


def test_a_broken_decompressed_shard_is_made_anew(copy):
    """A killed run or a full disk may leave one."""
    whole = step_tokens([load(PackedData.open(str(copy)))])
    for file in copy.glob("train/*/*.mds"):
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 1
        file.write_bytes(content if file.parent.name == "a" else content[:50])
    assert step_tokens([load(PackedData.open(str(copy)))]) == whole


def _sum_of_tokens(path: str) -> int:
    return sum(int(row.tokens.sum()) for _, row in PackedData.open(path).rows())


def test_many_processes_decompress_at_once(copy):
    with get_context("fork").Pool(4) as pool:
        totals = set(pool.map(_sum_of_tokens, [str(copy)] * 4, chunksize=1))
    assert totals == {_sum_of_tokens(str(copy))}


def test_a_stalled_loader_is_an_error(folder, monkeypatch):
    monkeypatch.setattr(RowStore, "__getitem__", lambda store, row: time.sleep(60))
    # torch waits so long, twice, for a worker that stands still before it kills it.
    monkeypatch.setattr("torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL", 0.2)
    start = time.monotonic()
    with pytest.raises(UserError, match=r"rank 0 got no batch from its loader, reading .*shard.00"):
        load(PackedData.open(str(folder)), num_workers=1, timeout=1)
    assert time.monotonic() - start < 20


def test_a_killed_worker_is_an_error(folder, monkeypatch):
    monkeypatch.setattr(RowStore, "__getitem__", lambda store, row: os._exit(1))
    with pytest.raises(WorkerKilled, match=r"a worker of the data loader was killed .*exited unexpectedly") as raised:
        load(PackedData.open(str(folder)), num_workers=1, timeout=30)
    assert raised.value.code == STALLED


def test_a_cache_is_filled_from_elsewhere(folder, tmp_path):
    local = step_tokens([load(PackedData.open(str(folder)))])
    source = tmp_path / "remote"
    shutil.copytree(folder, source, ignore=shutil.ignore_patterns("*.mds", "*.lock"))
    before = sorted(source.rglob("*"))
    data = PackedData.open(str(source), cache=str(tmp_path / "cache"))
    assert step_tokens([load(data)]) == local
    assert sorted(source.rglob("*")) == before
    assert Path(data.tokenizer_file).is_relative_to(tmp_path / "cache")
    with pytest.raises(UserError, match=r"data.path=s3://bucket/x is remote: data.cache must name"):
        PackedData.open("s3://bucket/x")


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("microbatch", [1, 3])
def test_validation_rows_are_the_same_on_any_layout(folder, world, microbatch):
    data = PackedData.open(str(folder), "valid")
    rows = 7
    ranks = [list(valid_batches(data, rows, microbatch, rank, world)) for rank in range(world)]
    assert len({len(batches) for batches in ranks}) == 1
    plain = list(valid_batches(data, rows, 1))
    assert len(plain) == rows
    assert sum(b.num_targets for batches in ranks for b in batches) == sum(b.num_targets for b in plain)
    every = list(valid_batches(data, 10**6, 1))
    assert len(every) == sum(data.sources.values())
    assert data.bytes_per_target > 0.5


def test_open_refuses_what_does_not_fit(copy, tmp_path):
    fingerprint = PackedData.open(str(copy), vocab_size=280, length=LENGTH).fingerprint
    PackedData.open(str(copy), fingerprint=fingerprint, vocab_size=384)
    assert PackedData.open(str(copy), vocab_size=50_304).vocab_size == 280  # the model may have more rows
    for arguments, sentence in [
        ({"vocab_size": 279}, "vocabulary of 280, but model.vocab_size=279 has no rows for ids from 279 on"),
        ({"length": 64}, "rows of 32 tokens, but data.length=64"),
        ({"fingerprint": "0"}, "not the data that the checkpoint was trained on"),
        ({"split": "test"}, "no rows in its split 'test'"),
    ]:
        with pytest.raises(UserError, match=sentence):
            PackedData.open(str(copy), **arguments)
    with pytest.raises(UserError, match=r"python -m data_prep pack --out .*/none --length 32"):
        PackedData.open(str(tmp_path / "none"), length=LENGTH)
    for path in (tmp_path / "none", tmp_path):
        with pytest.raises(UserError, match="run make data"):
            PackedData.open(str(path), hint="run make data")


@pytest.mark.parametrize("name", ["manifest.json", "train/a/index.json"])
def test_flipped_metadata_is_refused(copy, name):
    whole = (copy / name).read_bytes()
    for position in np.random.default_rng(0).integers(0, len(whole), 10):
        broken = bytearray(whole)
        broken[position] ^= 4
        (copy / name).write_bytes(broken)
        with pytest.raises(UserError, match=Path(name).name):
            PackedData.open(str(copy))


def test_a_changed_tokenizer_is_refused(copy):
    data = PackedData.open(str(copy))
    assert Path(data.tokenizer_file).is_file()
    (copy / "tokenizer.json").write_bytes((copy / "tokenizer.json").read_bytes().replace(b"alpha", b"alphb", 1) + b" ")
    with pytest.raises(UserError, match=r"tokenizer.json is missing or corrupt"):
        _ = data.tokenizer_file


def test_the_fingerprint_is_the_content(copy):
    before = PackedData.open(str(copy)).fingerprint
    manifest = json.loads((copy / "manifest.json").read_text())
    manifest["inputs"] = "from elsewhere"
    assert manifests.fingerprint(manifest) == before
    manifest["files"]["train/a/shard.00000.mds.zstd"]["sha256"] = "0"
    assert manifests.fingerprint(manifest) != before
