"""The chart of the kernels is drawn from the tables of the docs, into the file that the user names and no other."""

import subprocess
import sys
from pathlib import Path

import pytest

from eval.benchmarks import kernel_chart
from ssscale.errors import UserError

PNG = b"\x89PNG\r\n"


def test_without_a_file_nothing_is_drawn() -> None:
    file = kernel_chart.ROOT / "kernels" / "speed.png"
    before = file.read_bytes(), file.stat().st_mtime_ns
    command = [sys.executable, "-m", "eval.benchmarks.kernel_chart"]
    result = subprocess.run(command, cwd=kernel_chart.ROOT, capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr == "error: out=FILE is missing: the .png to write\n"
    assert (file.read_bytes(), file.stat().st_mtime_ns) == before


def test_the_named_file_is_drawn(tmp_path: Path) -> None:
    kernel_chart.main([f"out={tmp_path}/chart.png"])
    assert (tmp_path / "chart.png").read_bytes().startswith(PNG)
    for out, sentence in (
        ("chart.txt", r"chart.txt must end in \.png"),
        ("none/chart.png", "there is no folder .*none"),
    ):
        with pytest.raises(UserError, match=sentence):
            kernel_chart.main([f"out={tmp_path}/{out}"])
    assert [path.name for path in tmp_path.iterdir()] == ["chart.png"]
