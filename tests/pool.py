"""A pool of worker processes that have everything imported: a fresh launch costs many seconds, a job here little.

A job is a function of a module under tests/, called on every worker as job(**arguments); it returns something picklable.
"""

import importlib
import os
import traceback
from multiprocessing.connection import Connection
from typing import Any, ClassVar

from tests.train.forked import CONTEXT, ForkedProcess
from tests.train.ranks import free_port


def _serve(rank: int, size: int, port: int, pipe: Connection) -> None:
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
    }
    import warnings

    warnings.filterwarnings("ignore")  # of Megatron-core and DeepSpeed about parts that we do not use
    import torch

    torch.set_num_threads(1)
    while True:
        module, name, arguments = pipe.recv()
        try:
            pipe.send((True, getattr(importlib.import_module(module), name)(**arguments)))
        except BaseException:
            pipe.send((False, traceback.format_exc()))


class Pool:
    """`size` workers; `run` gives a job to all of them and returns their answers by rank.

    Workers start at the first job, and again after one that failed: its peers may still be inside a collective.
    """

    with_workers: ClassVar[set["Pool"]] = set()

    def __init__(self, size: int) -> None:
        self.size = size
        self.workers: list[tuple[Any, Connection]] = []

    def run(self, job: str, timeout: float = 200.0, **arguments: Any) -> list[Any]:
        """job: "package.module:function". Raises RuntimeError with the traceback of the first worker that failed."""
        if not self.workers:
            self._start()
        for _, pipe in self.workers:
            pipe.send((*job.split(":"), arguments))
        answers = []
        for rank, (_, pipe) in enumerate(self.workers):
            good, answer = pipe.recv() if pipe.poll(timeout) else (False, f"no answer within {timeout} s")
            if not good:
                self.close()
                raise RuntimeError(f"rank {rank} failed:\n{answer}")
            answers.append(answer)
        return answers

    def _start(self) -> None:
        port = free_port()
        self.with_workers.add(self)
        for rank in range(self.size):
            ours, theirs = CONTEXT.Pipe()
            process = ForkedProcess(target=_serve, args=(rank, self.size, port, theirs), daemon=True)
            process.start()
            self.workers.append((process, ours))

    def close(self) -> None:
        for process, _ in self.workers:
            process.kill()
        self.workers = []
        self.with_workers.discard(self)
