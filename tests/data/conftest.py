import random
import shutil
from pathlib import Path

import pytest

from data_prep.__main__ import main

LENGTH = 32


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data folder of three sources in several shards each. Not to be changed."""
    root = tmp_path_factory.mktemp("stream")
    rng = random.Random(0)
    flags = []
    for source, number in (("a", 60), ("b", 25), ("c", 9)):
        (root / source).mkdir()
        for i in range(number):
            text = " ".join(rng.choices(["alpha", "beta", "gamma", "delta", "\n"], k=rng.randint(2, 120)))
            (root / source / f"{i:03}.txt").write_text(f"{source} {i} {text}")
        flags += ["--source", f"{source}={root}/{source}"]
    flags += ["--train-vocab-size", "280", "--length", str(LENGTH), "--valid-fraction", "0.1", "--shard-bytes", "4000"]
    assert main(["pack", "--out", str(root / "data"), "--workers", "1", *flags]) == 0
    return root / "data"


@pytest.fixture
def copy(folder: Path, tmp_path: Path) -> Path:
    """A data folder that may be broken, without decompressed shards."""
    target = tmp_path / "data"
    shutil.copytree(folder, target, ignore=shutil.ignore_patterns("*.mds", "*.lock"))
    return target
