"""Fixtures of the tests that `make test-vllm` runs."""

import os
from typing import Any

import pytest

from tests.serving.engines import ENVIRONMENT, by_transformers


@pytest.fixture(scope="session")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What transformers computes from each export. Kept beside the exports, for repeated runs."""
    return by_transformers("served", tmp_path_factory.mktemp("modules"))


@pytest.fixture(scope="session")
def vllm_environment() -> None:
    os.environ.update(ENVIRONMENT)
