"""Fixtures that all tests share."""

import logging
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import pytest
import torch.distributed as dist

from ssscale.parallel.groups import Groups, initialize
from tests.pool import Pool
from tests.train.commands import run_command

ROOT = Path(__file__).resolve().parents[1]

# Begun first, so that no process of `make test` is left alone with one of them at the end.
FIRST = (
    "distributed/test_compiled.py",
    "distributed/test_gathered_blocks.py",
    "distributed/test_matrix.py",
    "distributed/test_overlap.py",
    "distributed/test_shards.py",
    "kernels/test_stickbreaking_paged.py",
    "distributed/test_activations.py",
    "distributed/test_checkpoint.py",
    "kernels/test_stickbreaking_training.py",
    "train/test_lost.py",
    "train/test_fp8.py",
    "hf/test_convert.py",
    "train/test_faults.py",
    "train/test_one_sentence.py",
    "chaos/test_chaos.py",
    "train/test_workers.py",
    "mixers/test_hybrid.py",
    "mixers/test_plugin.py",
    "optim/test_muon.py",
    "train/test_stragglers.py",
    "train/test_tasks.py",
    "train/test_stop.py",
    "kernels/test_stickbreaking_operator.py",
    "kernels/test_stickbreaking_triton.py",
    "train/test_stages.py",
    "test_extend.py",
    "optim/test_plugin.py",
)

pytest.register_assert_rewrite("tests.train.same")  # what differs is shown, as in a test module


def pytest_configure(config: pytest.Config) -> None:
    """Before `datasets` is imported: what it copies of the tests' files does not stay in the user's cache."""
    config.datasets_cache = os.environ["HF_DATASETS_CACHE"] = tempfile.mkdtemp(prefix="ssscale-datasets-")


def long_tests() -> list[str]:
    """Returns the entries of tests/long.txt."""
    lines = (ROOT / "tests" / "long.txt").read_text(encoding="utf-8").splitlines()
    return [line for line in lines if not line.startswith("#")]


@pytest.hookimpl(tryfirst=True)  # before pytest chooses by marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    places = {ROOT / "tests" / file: place for place, file in enumerate(FIRST)}
    missing = [str(path) for path in places if not path.exists()]
    assert not missing, missing
    items.sort(key=lambda item: places.get(item.path, len(FIRST)))
    long = set(long_tests())
    for item in items:
        file = item.nodeid.partition("::")[0].removeprefix("tests/")
        if long & {file, f"{file}::{getattr(item, 'originalname', '')}"}:
            item.add_marker(pytest.mark.long)


def pytest_unconfigure(config: pytest.Config) -> None:
    shutil.rmtree(config.datasets_cache, ignore_errors=True)


@pytest.fixture(autouse=True)
def _log_level() -> Iterator[None]:
    """Commands that a test calls in its own process set the level."""
    logger = logging.getLogger("ssscale")
    level = logger.level
    yield
    logger.setLevel(level)


@pytest.fixture(scope="session")
def groups() -> Iterator[Groups]:
    """This process alone. What a test calls in this process must not end them for the tests after it."""
    made, destroy = initialize(), dist.destroy_process_group
    with (
        patch("ssscale.parallel.groups.shutdown", lambda: None),
        patch.object(dist, "destroy_process_group", lambda group=None: group and destroy(group)),
    ):
        yield made


@pytest.fixture(scope="module", autouse=True)
def _idle_pools() -> Iterator[None]:
    """Workers end with the file whose tests used them: each has tens of gloo threads, which cost time while they idle."""
    yield
    for pool in list(Pool.with_workers):
        pool.close()


@pytest.fixture(scope="session")
def pool2() -> Iterator[Pool]:
    """Two gloo processes."""
    pool = Pool(2)
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def pool4() -> Iterator[Pool]:
    """Four gloo processes."""
    pool = Pool(4)
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def pool1() -> Iterator[Pool]:
    """One process with a world of its own."""
    pool = Pool(1)
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small data folder in tiny_sb's form, from this repository's own texts."""
    folder = tmp_path_factory.mktemp("corpus")
    sources = []
    for source, pattern in (("code", "ssscale/**/*.py"), ("docs", "docs/**/*.md")):
        # Held out by place, not by what a text says: editing a document must not empty a split.
        for number, path in enumerate(sorted(ROOT.glob(pattern))):
            place = folder / (f"{source}-valid" if number % 5 == 0 else source)
            place.mkdir(exist_ok=True)
            (place / f"{path.stem}_{path.parent.name}.txt").write_text(path.read_text())
        sources += [f"--source={source}={folder / source}", f"--source={source}={folder / f'{source}-valid'}:valid"]
    options = ["--train-vocab-size=1024", "--length=256", "--valid-fraction=0"]
    arguments = ["pack", "--out", str(folder / "data"), *options, *sources]
    code, output = run_command("data_prep", arguments, folder / "log")
    assert code == 0, output
    return folder / "data"
