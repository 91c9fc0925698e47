"""Runs of launch/pretrain.py whose processes are forked from one that has everything imported: a start takes a second."""

import json
import multiprocessing
import os
import random
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

from ssscale.options import last_of_each
from tests.train.forked import ForkedProcess

SMALL = ["config=tiny_sb", "model.num_layers=1", "model.hidden_size=32", "model.ffn_hidden_size=64"]
SMALL += ["model.num_heads=1", "train.batch_size=4", "train.microbatch=1", "train.log_every=1", "train.eval_every=0"]


def free_port() -> int:
    """Below the ports that the kernel gives out by itself, as one of those may be taken before the run listens on it."""
    while True:
        port = random.SystemRandom().randrange(10_000, 32_000)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def _rank(arguments: list[str], environment: dict[str, str], log: str, plant: Callable[[], None] | None) -> None:
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.environ |= environment
    multiprocessing.set_start_method("fork", force=True)  # as it is in a process of its own
    import torch

    torch.set_num_threads(1)
    from launch.boot import run
    from launch.pretrain import COMMAND, main

    sys.argv = ["launch/pretrain.py", *arguments]
    if plant is not None:
        plant()
    run(COMMAND, main)


class Ranks:
    """A run on `size` gloo processes. plant: called in each of them before the start, to break something there."""

    def __init__(
        self,
        arguments: list[str],
        run_dir: Path,
        size: int = 2,
        plant: Callable[[], None] | None = None,
        small: bool = True,
        log: Path | None = None,
    ) -> None:
        self.run_dir = run_dir
        self.log = log or run_dir.with_name(run_dir.name + ".log")
        self.log.parent.mkdir(parents=True, exist_ok=True)
        # 0 is the system's choice, which nobody else can take. Peers could not know it.
        port = free_port() if size > 1 else 0
        self.processes = []
        for rank in range(size):
            environment = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size)}
            environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
            keys = last_of_each([*(SMALL if small else []), *arguments, f"run_dir={run_dir}"])
            self.processes.append(ForkedProcess(target=_rank, args=(keys, environment, str(self.log), plant)))
        for process in self.processes:
            process.start()

    def wait(self, timeout: float = 100.0) -> list[int | None]:
        """The exit codes by rank."""
        end = time.monotonic() + timeout
        for process in self.processes:
            process.join(max(0.1, end - time.monotonic()))
        codes = [process.exitcode for process in self.processes]
        self.kill()
        assert None not in codes, f"no end within {timeout} s, exit codes {codes}:\n{self.output()}"
        return codes

    def finish(self) -> None:
        codes = self.wait(600)
        assert set(codes) == {0}, f"{codes}:\n{self.output()}"

    def records(self) -> list[dict[str, Any]]:
        from ssscale.train.records import read_metrics

        return read_metrics(self.run_dir / "metrics.jsonl")

    def wait_for(self, reached: Callable[[], bool], timeout: float = 60.0) -> None:
        end = time.monotonic() + timeout
        while not reached():
            alive = all(process.is_alive() for process in self.processes)
            assert alive, f"ended early:\n{self.output()}"
            assert time.monotonic() < end, f"not reached:\n{self.output()}"
            time.sleep(0.01)

    def wait_for_step(self, step: int) -> None:
        """Until this start has logged the step."""
        began = len(self.records())

        def reached() -> bool:
            records = self.records()
            fresh = began == 0 or len(records) != began  # a resumed run first cuts the records back
            return fresh and any(record["step"] >= step for record in records)

        self.wait_for(reached)

    def send(self, number: signal.Signals, rank: int = 0) -> None:
        os.kill(self.processes[rank].pid or 0, number)

    def kill(self) -> None:
        """kill -9 of all processes of the run, loader workers included."""
        victims = []
        for process in self.processes:
            if process.is_alive() and process.pid:
                victims += [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
        for victim in victims:
            try:
                victim.kill()
            except psutil.NoSuchProcess:
                continue
        for process in self.processes:
            process.join(10)

    def output(self) -> str:
        return self.log.read_text() if self.log.exists() else ""


@contextmanager
def running(*arguments: Any, **more: Any) -> Iterator[Ranks]:
    ranks = Ranks(*arguments, **more)
    try:
        yield ranks
    finally:
        ranks.kill()


def state_of(checkpoint: Path) -> dict[str, Any]:
    return json.loads((checkpoint / "state.json").read_text())
