"""One process per GPU, started by the command itself: `launch/pretrain.py config=3b_sb gpus=8`.

torchrun ends its workers 30 s after it has received a signal, while a large save takes longer; it passes no SIGUSR1 on; it
answers 1 for whatever code its workers had; and its report hides their sentence. So this is not built on it.
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

from launch.boot import ALONE, EXIT_CODES, ROOT, Option
from launch.process import WORKER
from ssscale.errors import STALLED, TOGETHER, UserError

OPTIONS = (
    Option("gpus", int, "start one process per GPU on this many of this machine's", at_least=1),
    Option("processes", int, "start this many processes on the CPU", at_least=1),
)
GPU = "gpu"  # WORKER's value where each rank has a GPU
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
ENDS = (0, *TOGETHER)  # codes with which all ranks end, each when it has finished
PATIENCE_S = 30.0  # for the others after one has failed: they may be inside a collective with it, and say why
POLL_S = 0.05


def gpus_here() -> int:
    """NVIDIA GPUs that a process started here may use, by their device files: asking torch takes seconds."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([entry for entry in visible.split(",") if entry.strip() not in ("", "-1", "NoDevFiles")])
    return len(list(Path("/dev").glob("nvidia[0-9]*")))


def check_device(cuda: bool) -> None:
    """cuda: what torch says. Raises UserError in a rank that gpus= has started where torch can use no GPU."""
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
        """What gpus= or processes= ask for, None without either. Raises UserError where this machine cannot give it."""
        gpus, processes = options.get("gpus"), options.get("processes")
        if gpus is None and processes is None:
            return None
        if gpus is not None and processes is not None:
            raise UserError(f"gpus={gpus} and processes={processes}: GPUs or CPU processes, give one of the two")
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
        """Run a command of ours as so many ranks, pass signals on to them, and return their exit code.

        The first rank that fails decides the code; a rank that was killed makes it 76. Where ranks end together (a signal,
        losses that stay NaN), each is waited for. After a mistake the others are killed while the rank that said it is still
        there, as a lost connection would have them add tracebacks to its sentence. saves: the ranks enter StopSignals, and a
        signal waits until they have.
        """
        with _passing_on() as (children, received), TemporaryDirectory() as temporary:
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
        places |= {WORKER: GPU if self.gpu else "cpu", EXIT_CODES: noted}
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
    """Processes to which this one passes SIGTERM, SIGINT and SIGUSR1 on, and the signals that it has passed on."""
    children: list[subprocess.Popen[bytes]] = []
    received: list[int] = []

    def pass_on(number: int, frame: FrameType | None) -> None:
        received.append(number)
        for child in children:
            child.send_signal(number)

    before = {number: signal.signal(number, pass_on) for number in SIGNALS}
    try:
        yield children, received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _kill(children: list[subprocess.Popen[bytes]]) -> None:
    for number in (signal.SIGSTOP, signal.SIGKILL):  # all stand still before the first one's connections break
        for child in children:
            child.send_signal(number)
    for child in children:
        child.wait()


def _wait(children: list[subprocess.Popen[bytes]], received: list[int], noted: Path) -> int:
    """The exit code, once all have ended, one has noted a mistake, or PATIENCE_S after one has failed otherwise."""
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
        print(f"stopped: {killed}: the same command goes on from the newest checkpoint", file=sys.stderr)
        return STALLED
    return first
