"""100 random flips of a byte in the shards and the metadata: `verify` and training name the file, neither goes on."""

import shutil
from pathlib import Path

import numpy as np
import pytest

from data_prep.errors import DataError
from data_prep.progress import Progress
from data_prep.verify import verify
from ssscale.data.stream import PackedData, make_loader
from ssscale.errors import UserError


def read_all(folder: Path) -> None:
    """What training does: open, read the tokenizer for the checkpoint, read every row at least once."""
    data = PackedData.open(str(folder))
    _ = data.tokenizer_file
    rows = sum(data.sources.values())
    for _ in make_loader(
        data, mixes=[(0, None)], seed=0, first_sample=0, num_samples=rows, batch_size=rows, microbatch=1
    ):
        pass


def test_every_flip_is_found(folder: Path, tmp_path: Path) -> None:
    rng = np.random.default_rng(7)
    names = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
    names = [name for name in names if name.endswith((".json", ".zstd")) and not name.startswith("valid")]
    sizes = np.array([(folder / name).stat().st_size for name in names])
    # Half of them anywhere, by size; half in a file drawn first, or index.json would hardly be among them.
    chosen = [*rng.choice(len(names), 50, p=sizes / sizes.sum()), *rng.integers(0, len(names), 50)]
    copy = tmp_path / "data"
    for number in chosen:
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(folder, copy, ignore=shutil.ignore_patterns("*.mds", "*.lock"))
        file = copy / names[number]
        content = bytearray(file.read_bytes())
        content[rng.integers(len(content))] ^= 1 << int(rng.integers(8))
        file.write_bytes(content)
        with Progress() as progress, pytest.raises(DataError, match=names[number]):
            verify(str(copy), progress)
        with pytest.raises(UserError, match=names[number]):
            read_all(copy)
