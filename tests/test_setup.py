"""`make setup`: which stack it installs, when it installs again, and how it fails."""

import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FILES = ("Makefile", "pyproject.toml", "setup.py", "constraints.txt", "constraints-gpu.txt", "constraints-cpu.txt")


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """What `make setup` reads, installed for the CPU a moment ago."""
    for name in FILES:
        shutil.copy2(ROOT / name, tmp_path / name)
        os.utime(tmp_path / name, (time.time() - 60,) * 2)
    (tmp_path / ".venv").mkdir()
    (tmp_path / ".venv" / "installed").write_text("cpu\n")
    return tmp_path


def make(checkout: Path, *arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    kept = {key: value for key, value in os.environ.items() if key not in ("STACK", "VENV", "MAKEFLAGS", "MAKELEVEL")}
    command = ["make", *arguments, f"PYTHON={sys.executable}"]
    return subprocess.run(command, cwd=checkout, env=kept | environ, capture_output=True, text=True)


def due(checkout: Path, stack: str = "cpu") -> bool:
    return make(checkout, "-q", "setup", f"STACK={stack}").returncode == 1


def test_a_changed_constraint_installs_again(checkout: Path) -> None:
    assert not due(checkout)
    os.utime(checkout / "constraints-gpu.txt", (time.time() + 60,) * 2)  # of the other stack
    assert not due(checkout)
    for name in ("constraints.txt", "constraints-cpu.txt", "pyproject.toml", "setup.py"):
        os.utime(checkout / name, (time.time() + 60,) * 2)
        assert due(checkout), name
        os.utime(checkout / name, (time.time() - 60,) * 2)
        assert not due(checkout)


def test_the_other_stack_is_installed_where_it_is_asked_for(checkout: Path) -> None:
    assert due(checkout, "gpu")
    (checkout / ".venv" / "installed").write_text("gpu\n")
    assert not due(checkout, "gpu")
    assert make(checkout, "-q", "setup").returncode == 0  # what is installed stays, with a GPU or without


def test_mistakes_end_in_a_sentence(checkout: Path) -> None:
    done = make(checkout, "setup", "STACK=tpu")
    assert done.returncode == 2
    assert "STACK=tpu must be gpu or cpu" in done.stderr
    (checkout / ".venv" / "installed").unlink()
    done = make(checkout, "setup", "STACK=cpu", "DISK_cpu=99999 1")
    assert done.returncode == 2
    assert "error: ./ has " in done.stderr
    # Virtual environment and temporary folder share a disk, or not.
    together = os.stat(checkout).st_dev == os.stat(tempfile.gettempdir()).st_dev
    assert f"free disk, the set-up (STACK=cpu) takes {99999 + together} GB there" in done.stderr
    done = make(checkout, "setup", "STACK=cpu", "DISK_cpu=1 99999", TMPDIR="/dev/shm")
    assert done.returncode == 2
    assert "error: /dev/shm has " in done.stderr
    # No index to install from: what a user without a network meets.
    done = make(checkout, "setup", "STACK=cpu", "DISK_cpu=0 0", PIP_NO_INDEX="1", PIP_CONFIG_FILE="/dev/null")
    assert done.returncode == 2
    assert "error: pip could not install the pinned dependencies" in done.stderr
    assert not (checkout / ".venv" / "installed").exists()
