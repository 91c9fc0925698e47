"""Jobs of one node beside one another, and after one that was killed."""

import os
import shutil
import time
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path

import psutil
import pytest

from ssscale.data.shards import locked
from ssscale.data.stream import PackedData, make_loader


def steps(folder: str, workers: int = 1):
    data = PackedData.open(folder)
    return make_loader(
        data,
        mixes=[(0, None)],
        seed=1,
        first_sample=0,
        num_samples=2000,
        batch_size=8,
        microbatch=8,
        num_workers=workers,
        timeout=60,
    )


def tokens(folder: str) -> list[list[int]]:
    return [batch.tokens.tolist() for step in steps(folder) for batch in step]


def _endless(folder: str, pipe: Connection) -> None:
    for number, _ in enumerate(steps(folder)):
        if number == 3:
            pipe.send(True)
            time.sleep(600)


def _tokens(folder: str, pipe: Connection) -> None:
    pipe.send(tokens(folder))


@pytest.fixture
def copy(folder: Path, tmp_path: Path) -> str:
    shutil.copytree(folder, tmp_path / "data", ignore=shutil.ignore_patterns("*.mds", "*.lock"))
    return str(tmp_path / "data")


def start(job, folder: str):
    ours, theirs = get_context("fork").Pipe()
    process = get_context("fork").Process(target=job, args=(folder, theirs))
    process.start()
    return process, ours


def test_a_killed_job_leaves_nothing_in_the_way(copy: str) -> None:
    before = set(os.listdir("/dev/shm"))
    first, at_work = start(_endless, copy)
    assert at_work.recv()
    second, answer = start(_tokens, copy)  # side by side, on the same files
    family = [first, *psutil.Process(first.pid).children(recursive=True)]
    for process in family[::-1]:
        process.kill()
    first.join()
    assert answer.recv() == tokens(copy)  # the other one has not noticed; a third one starts at once
    second.join()
    assert set(os.listdir("/dev/shm")) <= before


def _hold(folder: str, pipe: Connection) -> None:
    shard = next(Path(folder).glob("train/a/*.zstd")).with_suffix("")
    lock = locked(shard)
    lock.acquire()
    pipe.send(True)
    time.sleep(600)


def test_a_lock_ends_with_its_holder(copy: str) -> None:
    holder, ready = start(_hold, copy)
    assert ready.recv()
    waiting, answer = start(_tokens, copy)
    assert not answer.poll(1)  # it waits for the shard
    holder.kill()
    holder.join()
    assert answer.recv() == tokens(copy)
    waiting.join()
