"""Fixtures of the tests that `make test-vllm` runs."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.serving.engines import ENVIRONMENT, EXPORTS

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What transformers computes from each export. Kept beside the exports, for repeated runs."""
    file = EXPORTS / "tokens.json"
    if not file.exists():
        modules = {"HF_MODULES_CACHE": str(tmp_path_factory.mktemp("modules"))}
        command = [sys.executable, "-m", "tests.serving.reference", str(EXPORTS / "served"), str(file)]
        done = subprocess.run(command, cwd=ROOT, env=os.environ | modules, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(file.read_text(encoding="utf-8"))


@pytest.fixture(scope="session")
def vllm_environment() -> None:
    os.environ.update(ENVIRONMENT)
