"""Data sets that lie elsewhere: a cache with a limit, an object store, and what goes wrong with them."""

import json
import os
import random
import shutil
from collections.abc import Iterator
from multiprocessing import get_context
from pathlib import Path
from unittest.mock import patch

import pytest

from data_prep.__main__ import main
from ssscale.data.shards import RowStore
from ssscale.data.stream import PackedData, make_loader
from ssscale.errors import UserError

BATCH = 8


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two sources in many shards. Not to be changed."""
    root = tmp_path_factory.mktemp("remote")
    rng = random.Random(1)
    for name in ("a", "b"):
        lines = [json.dumps({"text": " ".join(rng.choices(["alpha", "beta", "gamma"], k=90))}) for _ in range(70)]
        (root / f"{name}.jsonl").write_text("\n".join(lines))
    flags = ["--train-vocab-size", "270", "--length", "32", "--valid-fraction", "0", "--shard-bytes", "1500"]
    sources = ["--source", f"a={root}/a.jsonl", "--source", f"b={root}/b.jsonl", "--workers", "1"]
    assert main(["pack", "--out", str(root / "data"), *sources, *flags]) == 0
    return root / "data"


@pytest.fixture
def remote(folder: Path, tmp_path: Path) -> Path:
    target = tmp_path / "remote"
    shutil.copytree(folder, target, ignore=shutil.ignore_patterns("*.mds", "*.lock"))
    return target


def rows(data: PackedData, num_samples: int = 400, **changes: object) -> list[bytes]:
    arguments = {"mixes": [(0, None)], "seed": 2, "first_sample": 0, "batch_size": BATCH, "microbatch": BATCH}
    steps = make_loader(data, num_samples=num_samples, **(arguments | changes))
    return [row.tobytes() for step in steps for batch in step for row in batch.tokens.numpy().reshape(BATCH, -1)]


def kept(cache: Path) -> int:
    return sum(path.stat().st_size for path in cache.rglob("*.mds*") if path.suffix != ".lock")


def needed(data: PackedData) -> int:
    return sum(store.working_set for store in data.stores.values())


def test_a_set_larger_than_its_cache_streams(folder: Path, remote: Path, tmp_path: Path) -> None:
    local = PackedData.open(str(folder))
    limit, cache = needed(local), tmp_path / "cache"
    data = PackedData.open(str(remote), cache=str(cache), cache_gb=limit / 1e9)
    assert sum(int(r.raw_data.bytes) for store in data.stores.values() for r in store._readers) > 1.3 * limit
    most, seen = 0, []
    steps = make_loader(
        data, mixes=[(0, None)], seed=2, first_sample=0, num_samples=400, batch_size=BATCH, microbatch=BATCH
    )
    for step in steps:
        seen += [row.tobytes() for row in step[0].tokens.numpy().reshape(BATCH, -1)]
        most = max(most, kept(cache))
    assert seen == rows(local)
    assert limit / 2 < most <= limit
    assert not list(cache.rglob("*.zstd"))  # what is decompressed is not kept compressed too
    with pytest.raises(UserError, match=r"data.cache_gb=.* is too little for .*remote: the shards that are shuffled"):
        PackedData.open(str(remote), cache=str(cache), cache_gb=(limit - 1) / 1e9)


def _read(remote: str, cache: str, limit: int, seed: int) -> int:
    data = PackedData.open(remote, cache=cache, cache_gb=limit / 1e9)
    return hash(tuple(rows(data, seed=seed)))


def test_processes_share_a_cache(folder: Path, remote: Path, tmp_path: Path) -> None:
    """Each makes room under the feet of the others, which read other shards at the time."""
    limit, cache = needed(PackedData.open(str(folder))), str(tmp_path / "cache")
    with get_context("fork").Pool(3) as pool:
        jobs = [pool.apply_async(_read, (str(remote), cache, limit, seed)) for seed in range(3)]
        hashes = [job.get(120) for job in jobs]
    assert hashes == [hash(tuple(rows(PackedData.open(str(folder)), seed=seed))) for seed in range(3)]


def test_opening_does_not_depend_on_what_another_process_deletes_meanwhile(remote: Path, tmp_path: Path) -> None:
    data = PackedData.open(str(remote), cache=str(tmp_path / "cache"))
    with patch.object(Path, "is_file", return_value=True):  # it was there a moment ago
        assert [store.missing() for store in data.stores.values()] == [None] * len(data.stores)


def test_workers_read_through_a_cache(folder: Path, remote: Path, tmp_path: Path) -> None:
    limit = needed(PackedData.open(str(folder)))
    data = PackedData.open(str(remote), cache=str(tmp_path / "cache"), cache_gb=limit / 1e9)
    assert rows(data, num_workers=2, timeout=60) == rows(PackedData.open(str(folder)))


@pytest.mark.parametrize("fault", ["corrupt", "gone"])
def test_a_fault_of_the_remote_names_the_shard(remote: Path, tmp_path: Path, fault: str) -> None:
    shard = sorted(remote.glob("train/a/*.zstd"))[1]
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    if fault == "gone":
        shard.unlink()
    data = PackedData.open(str(remote), cache=str(tmp_path / "cache"))
    with pytest.raises(UserError, match=f"rank 0: shard .*train/a/{shard.name} is missing or corrupt"):
        rows(data)
    shard.write_bytes(whole)  # mended: the next run downloads it again
    assert len(rows(PackedData.open(str(remote), cache=str(tmp_path / "cache")))) == 400


@pytest.fixture
def bucket(remote: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The data set in an S3-compatible server on this machine (moto)."""
    import boto3
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    for name, value in {
        "S3_ENDPOINT_URL": f"http://{host}:{port}",
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
    }.items():
        monkeypatch.setenv(name, value)
    client = boto3.client("s3", endpoint_url=os.environ["S3_ENDPOINT_URL"])
    client.create_bucket(Bucket="data")
    for file in remote.rglob("*"):
        if file.is_file():
            client.upload_file(str(file), "data", f"set/{file.relative_to(remote)}")
    yield "s3://data/set"
    server.stop()


def test_an_object_store(folder: Path, bucket: str, tmp_path: Path) -> None:
    import boto3

    limit = needed(PackedData.open(str(folder)))
    data = PackedData.open(bucket, cache=str(tmp_path / "cache"), cache_gb=limit / 1e9)
    assert rows(data) == rows(PackedData.open(str(folder)))
    assert Path(data.tokenizer_file).is_file()
    with pytest.raises(UserError, match=r"cannot download manifest.json from s3://data/none"):
        PackedData.open("s3://data/none", cache=str(tmp_path / "cache"))
    client = boto3.client("s3", endpoint_url=os.environ["S3_ENDPOINT_URL"])
    for page in client.list_objects_v2(Bucket="data", Prefix="set/train/b")["Contents"]:
        if page["Key"].endswith(".zstd"):
            client.put_object(Bucket="data", Key=page["Key"], Body=b"broken")
    data = PackedData.open(bucket, cache=str(tmp_path / "new"))
    with pytest.raises(UserError, match=r"rank 0: shard .*train/b/shard.0000\d.mds.zstd is missing or corrupt"):
        rows(data, num_workers=1, timeout=60)


def test_nothing_is_left_in_shared_memory(folder: Path) -> None:
    """So that neither a crash nor another job on the node can disturb a run."""
    before = set(os.listdir("/dev/shm"))
    data = PackedData.open(str(folder))
    iterator = iter(data.rows())
    next(iterator)
    assert isinstance(data.stores["a"], RowStore)
    assert set(os.listdir("/dev/shm")) == before
