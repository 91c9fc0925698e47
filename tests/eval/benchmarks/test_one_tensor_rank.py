"""One tensor-parallel rank alone: the table has every way to compile the blocks."""

import os
import re
import subprocess
import sys

import pytest

from eval.benchmarks.one_tensor_rank import WAYS, main
from ssscale.errors import UserError


@pytest.mark.slow  # compiles five models
def test_every_way_is_measured() -> None:
    arguments = ["config=tiny_sb", "data.length=64", "model.num_layers=1", "rows=1", "steps=1"]
    command = [sys.executable, "-m", "eval.benchmarks.one_tensor_rank", *arguments]
    done = subprocess.run(
        command, capture_output=True, text=True, check=True, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )
    rows = [line.split("|")[1:-1] for line in done.stdout.splitlines() if re.search(r"\d", line)]
    assert [row[0].strip() for row in rows[1:]] == list(WAYS)
    for row in rows[1:]:
        assert all(float(cell.replace(",", "")) > 0 for cell in row[1:])
        assert len(row) == 2 + 3


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "config=NAME is missing"),
        (["config=tiny_sb", "rows=4,x"], "rows must be comma-separated integers, not '4,x'"),
        (["config=tiny_sb", "tensor=1"], "tensor must be at least 2"),
        (["config=tiny_sb", "tensor=8"], "parallel.tensor=8 does not divide model.num_heads=2"),
    ],
)
def test_bad_input(arguments: list[str], words: str) -> None:
    with pytest.raises(UserError, match=words):
        main(arguments)
