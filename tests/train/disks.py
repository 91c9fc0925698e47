"""Disks that fail, wait, hide or fill up, for processes and not for functions."""

import ctypes
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import forkserver
from pathlib import Path
from unittest import mock

import pytest

from tests.train.forked import PRELOAD
from tests.train.ranks import Ranks

ROOT = Path(__file__).resolve().parents[2]
CLONE_NEWNS, MS_BIND, MS_REC, MS_PRIVATE, MNT_DETACH = 0x20000, 4096, 16384, 1 << 18, 2


def faulty_library(folder: Path) -> Path:
    """tests/train/faulty.c, built."""
    library = folder / "faulty.so"
    source = Path(__file__).with_name("faulty.c")
    command = ["gcc", "-O1", "-shared", "-fPIC", "-o", str(library), str(source), "-ldl"]
    try:
        subprocess.run(command, check=True, capture_output=True)
    except FileNotFoundError:
        pytest.skip("needs gcc")
    return library


class Preloading:
    """Processes of tests.train.forked that are started within `used` are forked from one that has the library."""

    def __init__(self, library: Path) -> None:
        self.server = forkserver.ForkServer()
        self.server.set_forkserver_preload(PRELOAD)
        with mock.patch.dict(os.environ, LD_PRELOAD=str(library)):
            self.server.ensure_running()

    @contextmanager
    def used(self) -> Iterator[None]:
        with mock.patch.object(forkserver, "connect_to_new_process", self.server.connect_to_new_process):
            yield

    def end(self) -> None:
        self.server._stop()  # type: ignore[attr-defined]


def refuse(environment: dict[str, str]) -> None:
    """To plant in a process that is forked with faulty.c: it looks at the environment each time."""
    os.environ |= environment


def start_again() -> None:
    """To plant in a rank: it becomes a fresh process of launch/pretrain.py."""
    os.environ["PYTHONPATH"] = str(ROOT)
    os.execv(sys.executable, [sys.executable, str(ROOT / "launch/pretrain.py"), *sys.argv[1:]])


def _libc(name: str, *arguments: object) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if getattr(libc, name)(*arguments):
        raise OSError(ctypes.get_errno(), name)


def own_mounts() -> None:
    """What this process mounts from now on, no other sees."""
    _libc("unshare", CLONE_NEWNS)
    _libc("mount", b"none", b"/", None, MS_REC | MS_PRIVATE, None)


def hide(folder: Path) -> None:
    """An empty file system over a folder."""
    _libc("mount", b"tmpfs", bytes(folder), b"tmpfs", 0, b"size=64k")


def show(folder: Path) -> None:
    _libc("umount2", bytes(folder), MNT_DETACH)


def replace_file(file: Path, by: Path) -> None:
    _libc("mount", bytes(by), bytes(file), None, MS_BIND, None)


def needs_mounts() -> None:
    """Skip where this machine forbids mounts."""
    made = subprocess.run(["unshare", "-m", "true"], capture_output=True, check=False)
    if made.returncode:
        pytest.skip(f"this machine forbids mounts: {made.stderr.decode().strip()}")


@contextmanager
def small_disk(folder: Path, size: str) -> Iterator[Path]:
    """A file system of its own, mounted at `folder`."""
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    made = subprocess.run(command, capture_output=True, check=False)
    if made.returncode:
        pytest.skip(f"this machine forbids mounts: {made.stderr.decode().strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def wait_until(reached: Callable[[], bool], timeout: float = 60.0) -> None:
    end = time.monotonic() + timeout
    while not reached():
        assert time.monotonic() < end, "not reached in time"
        time.sleep(0.01)


def fill(folder: Path) -> Path:
    """A file that takes all that is left."""
    file = folder / "filler"
    free = os.statvfs(folder)
    with open(file, "wb", buffering=0) as opened:
        os.posix_fallocate(opened.fileno(), 0, free.f_bavail * free.f_frsize)
        opened.seek(0, os.SEEK_END)
        for size in (4096, 512, 1):
            try:
                while opened.write(bytes(size)):
                    pass
            except OSError:
                continue
    return file


def shown_step(ranks: Ranks) -> int:
    """The last step on the terminal, which lies on another disk."""
    steps = [line.split()[1] for line in ranks.output().splitlines() if line.startswith("step ") and "loss" in line]
    return int(steps[-1].replace(",", "")) if steps else 0
