from eval.checkpoint.environment import prepare

prepare()
from pathlib import Path

import pytest

from tests.hf.jobs import make_tokenizer


@pytest.fixture(scope="session")
def tokenizer_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """300 tokens. The first one marks the borders of documents."""
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer") / "tokenizer.json")
