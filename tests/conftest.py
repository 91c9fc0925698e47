"""Fixtures that all tests share."""

from collections.abc import Iterator

import pytest

from ssscale.parallel.groups import Groups, initialize
from tests.pool import Pool


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
