"""docs/reference/data_format.md gives a program that writes the format: it runs, and what it writes is read."""

import re
from pathlib import Path

import numpy as np

from data_prep.__main__ import main
from ssscale.data.stream import PackedData
from ssscale.data.streaming_patches import import_streaming

ROOT = Path(__file__).resolve().parents[2]


def test_the_documented_writer(folder: Path, tmp_path: Path) -> None:
    import_streaming()
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs/reference/data_format.md").read_text(), re.DOTALL)
    names: dict = {}
    exec(code, names)
    tokens = np.arange(64) % 270 + 1
    tokens[[0, 10, 32]] = 0
    rows = [
        (tokens[:32], [10, 22], [0, 1], [0, 0]),
        (tokens[32:], [32], [2], [0]),
    ]
    tokenizer = (folder / "tokenizer.json").read_bytes()
    names["write"](tmp_path / "new", tokenizer, 280, 0, 0, 32, rows, 3, 150)
    assert main(["verify", str(tmp_path / "new")]) == 0
    assert main(["stats", str(tmp_path / "new")]) == 0
    data = PackedData.open(str(tmp_path / "new"), vocab_size=280, length=32)
    read = [row.tokens.tolist() for _, row in data.rows()]
    assert read == [tokens[:32].tolist(), tokens[32:].tolist()]
