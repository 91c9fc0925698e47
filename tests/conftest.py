"""Fixtures that all tests share."""

import os
import shutil
import tempfile
from collections.abc import Iterator

import pytest

from ssscale.parallel.groups import Groups, initialize
from tests.pool import Pool


def pytest_configure(config: pytest.Config) -> None:
    """Before `datasets` is imported: what it copies of the tests' files does not stay in the user's cache."""
    config.datasets_cache = os.environ["HF_DATASETS_CACHE"] = tempfile.mkdtemp(prefix="ssscale-datasets-")


def pytest_unconfigure(config: pytest.Config) -> None:
    shutil.rmtree(config.datasets_cache, ignore_errors=True)


@pytest.fixture(scope="session")
def groups() -> Groups:
    """This process alone."""
    return initialize()


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
