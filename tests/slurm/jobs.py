"""A real Slurm of two nodes on this machine (cluster.sh), and jobs on it."""

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from ssscale.options import last_of_each
from ssscale.train.records import read_metrics
from tests.conftest import ROOT
from tests.train.ranks import SMALL

CLUSTER = Path(__file__).with_name("cluster.sh")
ARGUMENTS = ["train.save_every=20", "data.num_workers=0"]


def cluster(*arguments: str) -> None:
    subprocess.run([str(CLUSTER), *arguments], check=True, capture_output=True, timeout=60)


@contextmanager
def started(tmp_path_factory: pytest.TempPathFactory, **settings: str) -> Iterator[None]:
    """The cluster, with settings of cluster.sh; the tests are skipped where none comes up."""
    if shutil.which("slurmctld") is None or shutil.which("munged") is None:
        pytest.skip("Slurm is not installed: make test-slurm installs it")
    root = tmp_path_factory.mktemp("slurm")
    root.parent.chmod(0o755)  # munge wants its socket's folders readable
    for folder in (root, *root.parents[:2]):
        folder.chmod(0o755)
    own = os.getpid() % 10_000  # clusters of two test runs stand side by side
    os.environ |= {"SLURM_NET": f"10.{100 + own // 100}.{own % 100}", "SLURM_PORT": str(40_000 + 2 * own)}
    os.environ |= {"SLURM_ROOT": str(root), "SLURM_CONF": str(root / "slurm.conf"), "SSSCALE_PYTHON": sys.executable}
    os.environ |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    environment = os.environ | settings  # which Slurm's clients would read too
    for command in ([str(CLUSTER), "up"], ["srun", "--nodes=2", "--ntasks=2", "--mpi=none", "hostname"]):
        given = environment if command[0] == str(CLUSTER) else None
        try:
            done = subprocess.run(command, env=given, capture_output=True, text=True, check=False, timeout=180)
            problem = done.stderr.strip()[-300:] if done.returncode else None
        except subprocess.TimeoutExpired:
            problem = f"{command[0]} takes more than three minutes"
        if problem is not None:
            subprocess.run([str(CLUSTER), "down"], capture_output=True, check=False)
            pytest.skip(f"no Slurm of two nodes comes up here, as where namespaces are forbidden: {problem}")
    try:
        yield
    finally:
        cluster("down")


def losses(run: Path) -> list[float]:
    return [record["loss"] for record in read_metrics(run / "metrics.jsonl") if "loss" in record]


def submit(*arguments: str, timeout: float = 120.0) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "slurm/submit.py", *last_of_each(arguments)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=timeout)


def job_field(number: str, name: str) -> str:
    """A field of `scontrol show job`, such as JobState."""
    shown = subprocess.run(["scontrol", "show", "job", number], capture_output=True, text=True, check=False)
    return dict(text.split("=", 1) for text in shown.stdout.split() if "=" in text).get(name, "")


class Job:
    """A two-node training job through slurm/submit.py."""

    def __init__(self, run: Path, corpus: Path, *options: str, steps: int = 160) -> None:
        self.run = run
        where = [f"data.path={corpus}", f"run_dir={run}", "nodes=2", "gpus=1", f"train.max_steps={steps}"]
        result = submit(*SMALL, *ARGUMENTS, *where, *options)
        assert result.returncode == 0, result.stderr
        self.number, *self.followers = re.findall(r"^job (\d+)", result.stdout, re.MULTILINE)

    def log(self) -> str:
        file = self.run / f"slurm-{self.number}.log"
        return file.read_text() if file.is_file() else ""

    def field(self, name: str, number: str | None = None) -> str:
        return job_field(number or self.number, name)

    def wait_for(self, reached: Callable[[], Any], what: str, timeout: float = 300.0) -> None:
        end = time.monotonic() + timeout
        while not reached():
            assert time.monotonic() < end, (
                f"no {what}; {self.field('JobState')} {self.field('Reason')}\n{self.log()[-4000:]}"
            )
            time.sleep(0.2)

    def wait_for_step(self, step: int) -> None:
        self.wait_for(lambda: len(losses(self.run)) >= step, f"step {step}")

    def finish(self) -> None:
        self.wait_for(self.ended, "end", timeout=600)
        assert self.field("JobState") == "COMPLETED", self.log()[-4000:]

    def ended(self) -> bool:
        """Whether it is over: a job that queues itself again is FAILED for a moment."""
        over = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")
        if self.field("JobState") not in over:
            return False
        time.sleep(0 if self.field("JobState") == "COMPLETED" else 10)
        return self.field("JobState") in over
