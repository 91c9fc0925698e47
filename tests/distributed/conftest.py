"""The pools end with these tests: workers that have seen many layouts have hundreds of gloo's threads, which take a core."""

from collections.abc import Iterator

import pytest

from tests.pool import Pool


@pytest.fixture(scope="package", autouse=True)
def pools_end_here(pool1: Pool, pool2: Pool, pool4: Pool) -> Iterator[None]:
    yield
    for pool in (pool1, pool2, pool4):
        pool.close()
