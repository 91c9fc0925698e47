"""Starts one process per GPU from the command itself: `launch/pretrain.py config=3b_sb gpus=8`.

torchrun is not used, for four reasons. It kills its workers 30 s after a signal, which is too soon for a large save. It
does not forward SIGUSR1. Its exit code is 1 whatever the workers' codes are. Its report hides the workers' error
messages.
"""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType
from typing import Any

from launch.boot import ALONE, ROOT, Option
from launch.process import WORKER, follow_launcher
from ssscale.errors import STALLED, TOGETHER, UserError
from ssscale.launcher import EXIT_CODES, LAUNCHER

OPTIONS = (
    Option("gpus", int, "start one process per GPU on this many GPUs of this machine", at_least=1),
    Option("processes", int, "start this many processes on the CPU", at_least=1),
)
GPU = "gpu"  # value of WORKER if each rank has a GPU
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
ENDS = (0, *TOGETHER)  # codes that all ranks share, each after finishing its work
PATIENCE_S = 30.0  # for other ranks after a failure: one inside a collective may report the cause
POLL_S = 0.05


def gpus_here() -> int:
    """Counts the NVIDIA GPUs for processes started here, by device files: importing torch takes seconds."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([entry for entry in visible.split(",") if entry.strip() not in ("", "-1", "NoDevFiles")])
    return len(list(Path("/dev").glob("nvidia[0-9]*")))


def check_device(cuda: bool) -> None:
    """Raises UserError if gpus= has started this rank but torch has no GPU. cuda: whether torch has one."""
    if os.environ.get(WORKER) == GPU and not cuda:
        raise UserError(
            "gpus=: torch can use no GPU here: this is a CPU build of torch, or the driver is too old for it"
        )


@dataclass(frozen=True)
class Workers:
    count: int
    gpu: bool

    @classmethod
    def of(cls, options: dict[str, Any]) -> "Workers | None":
        """Returns the workers for gpus= or processes=, or None. Raises UserError if this machine cannot start them."""
        gpus, processes = options.get("gpus"), options.get("processes")
        if gpus is None and processes is None:
            return None
        if gpus is not None and processes is not None:
            raise UserError(f"gpus={gpus} and processes={processes}: give only one of them, for GPU or CPU processes")
        if "RANK" in os.environ or os.environ.get("SLURM_STEP_NUM_TASKS", "1") != "1":
            raise UserError(
                "gpus= and processes= start the processes themselves: leave them out under torchrun and srun"
            )
        if processes is not None:
            return cls(processes, gpu=False)
        here = gpus_here()
        assert gpus is not None
        if not here:
            raise UserError(f"gpus={gpus}: this machine has no NVIDIA GPU; processes=N starts processes on its CPU")
        if gpus > here:
            raise UserError(f"gpus={gpus}: this machine has {here}")
        return cls(gpus, gpu=True)

    def run(self, script: str, arguments: list[str], saves: bool = True) -> int:
        """Runs a command as `count` ranks, forwards signals to them, and returns their exit code.

        The first rank that fails determines the code; if it was killed, the code is 76. When all ranks end together
        (after a signal, or if losses stay NaN), each is waited for. After a mistake, the other ranks are killed while
        the rank that reported it is still alive: if they lost their connection to it, they would print tracebacks.
        saves: whether the ranks use StopSignals, in which case a signal is held back until they do.
        """
        with _passing_on() as (children, received), TemporaryDirectory() as temporary:
            follow_launcher()
            port, noted = _free_port(), Path(temporary) / "codes"
            with _blocked() if saves else nullcontext():
                for rank in range(self.count):
                    command = [sys.executable, str(ROOT / script), *arguments]
                    children.append(subprocess.Popen(command, env=self._environment(rank, port, noted)))
            try:
                return _wait(children, received, noted)
            finally:
                _kill(children)

    def _environment(self, rank: int, port: int, noted: Path) -> dict[str, str]:
        places: dict[str, Any] = {
            "RANK": rank,
            "LOCAL_RANK": rank,
            "WORLD_SIZE": self.count,
            "LOCAL_WORLD_SIZE": self.count,
        }
        places |= {"GROUP_RANK": 0, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        places |= {WORKER: GPU if self.gpu else "cpu", LAUNCHER: os.getpid(), EXIT_CODES: noted}
        environment = {"OMP_NUM_THREADS": "1"} | os.environ | {key: str(value) for key, value in places.items()}
        return environment if self.gpu else environment | {"CUDA_VISIBLE_DEVICES": ""}


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def _blocked() -> Iterator[None]:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def _passing_on() -> Iterator[tuple[list[subprocess.Popen[bytes]], list[int]]]:
    """Yields a list for child processes, to which signals are forwarded, and the list of signals received so far."""
    children: list[subprocess.Popen[bytes]] = []
    received: list[int] = []

    def pass_on(number: int, frame: FrameType | None) -> None:
        received.append(number)
        for child in children:
            child.send_signal(number)

    numbers = [*SIGNALS]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # else nohup has started this command
        numbers.append(signal.SIGHUP)
    before = {number: signal.signal(number, pass_on) for number in numbers}
    try:
        yield children, received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _kill(children: list[subprocess.Popen[bytes]]) -> None:
    for number in (signal.SIGSTOP, signal.SIGKILL):  # all stop before the first connection breaks
        for child in children:
            child.send_signal(number)
    for child in children:
        child.wait()


def _wait(children: list[subprocess.Popen[bytes]], received: list[int], noted: Path) -> int:
    """Returns the exit code when all ranks have ended, one has noted a mistake, or PATIENCE_S after another failure."""
    first, end = 0, float("inf")
    while True:
        codes = [child.poll() for child in children]
        mistakes = [int(text) for text in noted.read_text().split() if int(text) in ALONE] if noted.is_file() else []
        if mistakes:
            return mistakes[0]
        first = first or next((code for code in codes if code), 0)
        if first not in ENDS and end == float("inf"):
            end = time.monotonic() + PATIENCE_S
            for child in children:
                child.terminate()
        if None not in codes or time.monotonic() > end:
            break
        time.sleep(POLL_S)
    if -first in received:
        return 128 - first
    if first < 0:
        killed = f"rank {codes.index(first)} was killed ({signal.Signals(-first).name})"
        print(f"stopped: {killed}: the same command continues from the newest checkpoint", file=sys.stderr)
        return STALLED
    return first
