"""launch/benchmark_links.py: the bytes that it counts, and a run on two gloo processes."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from launch.benchmark_links import KINDS, bus_bytes, sizes

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("kind", "ranks", "factor"),
    [
        ("all-reduce", 2, 1.0),
        ("all-reduce", 8, 1.75),
        ("reduce-scatter", 8, 0.875),
        ("all-gather", 4, 0.75),
        ("all-to-all", 2, 0.5),
        ("send/recv", 8, 1.0),
    ],
)
def test_bus_bytes_are_those_of_nccl_tests(kind: str, ranks: int, factor: float) -> None:
    assert bus_bytes(kind, 1_000, ranks) == 1_000 * factor


def test_sizes_end_with_the_largest() -> None:
    assert sizes(2**30) == [2**10, 2**14, 2**18, 2**22, 2**26, 2**30]
    assert sizes(2**20) == [2**10, 2**14, 2**18, 2**20]


def test_two_processes_measure_every_collective() -> None:
    command = [sys.executable, "launch/benchmark_links.py", "processes=2", "largest=1"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("2 ranks, cpu\n")
    rows = re.findall(r"^\| (\S+) \| ([\d,]+) \| ([\d,.]+) \| (\S+) \|$", done.stdout, re.MULTILINE)
    assert [kind for kind, *_ in rows] == [kind for kind in KINDS for _ in range(4)]
    for kind, size, micros, rate in rows:
        number, time = int(size.replace(",", "")), float(micros.replace(",", "")) / 1e6
        assert float(rate) == pytest.approx(bus_bytes(kind, number, 2) / time / 1e9, rel=0.01)


def test_one_process_is_refused() -> None:
    done = subprocess.run([sys.executable, "launch/benchmark_links.py"], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        "error: one process has no links: give gpus=N or processes=N, or start it with torchrun or srun\n"
    )
