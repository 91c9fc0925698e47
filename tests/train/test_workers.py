"""`processes=2` (and gpus=, but for the device): ranks that the command starts itself, their signals and their exit codes."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from shutil import copytree
from typing import Any

import psutil
import pytest

from launch import workers
from launch.workers import Workers
from ssscale.errors import UserError
from ssscale.options import last_of_each
from ssscale.train.checkpoint_folder import list_checkpoints
from ssscale.train.records import read_metrics
from tests.promises import promises
from tests.train.commands import start_command
from tests.train.forks import fork_ranks
from tests.train.ranks import SMALL

ROOT = Path(__file__).resolve().parents[2]
NOT_OURS = ("Traceback", "destroy_process_group", "torch.distributed.elastic", "resource_tracker")


class Started:
    """launch/pretrain.py with two CPU ranks. fresh: in new interpreters, as users start them, instead of forked ones."""

    def __init__(self, corpus: Path, run_dir: Path, *arguments: str, fresh: bool = False) -> None:
        self.run_dir, self.log = run_dir, run_dir.with_name(f"{time.monotonic_ns()}.log")
        options = [*SMALL, f"data.path={corpus}", f"run_dir={run_dir}", "processes=2", "train.save_every=100000"]
        options = last_of_each([*options, *arguments])
        self.process: Any
        if fresh:
            environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
            command = [sys.executable, "launch/pretrain.py", *options]
            with self.log.open("w") as log:
                self.process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=log)
        else:
            self.process = start_command("launch.pretrain", options, self.log, fork_ranks)

    def workers(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children()

    def code(self) -> int | None:
        return self.process.poll() if isinstance(self.process, subprocess.Popen) else self.process.exitcode

    def send(self, number: signal.Signals) -> None:
        assert self.code() is None
        os.kill(self.process.pid, number)

    def wait_for_step(self, step: int) -> None:
        end = time.monotonic() + 120
        while not any(record["step"] >= step for record in read_metrics(self.run_dir / "metrics.jsonl")):
            assert self.code() is None, self.log.read_text()
            assert time.monotonic() < end, self.log.read_text()
            time.sleep(0.05)

    def end(self, killed: bool = False) -> tuple[int | None, str]:
        """The exit code and the last line, with nothing of a launcher in the output (killed: what a rank saw may be there)."""
        end = time.monotonic() + 120
        while self.code() is None:
            assert time.monotonic() < end, self.log.read_text()
            time.sleep(0.05)
        output = self.log.read_text()
        for words in NOT_OURS:
            assert killed or words not in output, output
        return self.code(), output.splitlines()[-1]


@contextmanager
def started(*arguments: Any, fresh: bool = False) -> Iterator[Started]:
    run = Started(*arguments, fresh=fresh)
    try:
        yield run
    finally:
        for process in [*run.workers(), psutil.Process(run.process.pid)] if run.code() is None else []:
            process.kill()


def test_a_signal_is_passed_on_and_the_step_is_saved(corpus: Path, tmp_path: Path) -> None:
    broken = Path(copytree(corpus, tmp_path / "data"))
    shard = next(broken.glob("train/code/*.zstd"))
    shard.unlink()
    shard.with_suffix("").unlink(missing_ok=True)
    with started(corpus, tmp_path / "run", "train.max_steps=1000000", fresh=True) as run:
        run.wait_for_step(2)
        with started(corpus, tmp_path / "run") as second:
            code, said = second.end()
            assert code == 2
            assert said.startswith(f"error: {tmp_path / 'run'} is in use by process")
        with started(broken, tmp_path / "other") as third:  # a mistake that only a rank can see
            code, said = third.end()
            assert code == 2
            assert said == f"error: shard {shard} is missing or of the wrong size"
        run.send(signal.SIGTERM)
        code, said = run.end()
    assert code == 75
    assert said.startswith("stopped: SIGTERM")
    assert len(list_checkpoints(tmp_path / "run/checkpoints")) == 1


@promises(
    "Ranks",
    "one rank of `gpus=N` is killed",
    seen="`rank 1 was killed (SIGKILL): …`; the other ranks end too",
    code="76",
    identical="from the last save",
    do="run the same command again",
)
def test_a_killed_rank_ends_the_others(corpus: Path, tmp_path: Path) -> None:
    with started(corpus, tmp_path / "run", "train.max_steps=1000000") as run:
        run.wait_for_step(1)
        every = run.workers()
        assert len(every) == 2
        every[1].kill()
        code, said = run.end(killed=True)
    assert (code, said) == (
        76,
        "stopped: rank 1 was killed (SIGKILL): the same command continues from the newest checkpoint",
    )
    assert not [worker for worker in every if worker.is_running()]


@promises(
    "Stops and starts",
    "only the command `launch/pretrain.py gpus=N` is killed",
    seen="the ranks save and end",
    code="75",
    do="run the same command again",
)
def test_ranks_stop_when_the_command_is_killed_alone(corpus: Path, tmp_path: Path) -> None:
    with started(corpus, tmp_path / "run", "train.max_steps=1000000") as run:
        run.wait_for_step(1)
        every = run.workers()
        run.send(signal.SIGKILL)
        _, left = psutil.wait_procs(every, timeout=60)
        assert not left
    assert len(list_checkpoints(tmp_path / "run/checkpoints")) == 1  # and they saved


LAUNCH = """
import os, subprocess, sys
tied = os.environ | {"SSSCALE_LAUNCHER": str(os.getpid())}
command = subprocess.Popen(sys.argv[1:], env=tied, stdout=subprocess.DEVNULL)
print(command.pid, flush=True)
command.wait()
"""


def test_ranks_save_when_what_started_the_command_is_killed(corpus: Path, tmp_path: Path) -> None:
    """As a study is, or a benchmark: the command and its ranks end with it."""
    options = [*SMALL, f"data.path={corpus}", f"run_dir={tmp_path / 'run'}", "processes=2", "train.save_every=100000"]
    options = last_of_each([*options, "train.max_steps=1000000"])
    command = [sys.executable, "-c", LAUNCH, sys.executable, "launch/pretrain.py", *options]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as study:
        assert study.stdout is not None
        run = psutil.Process(int(study.stdout.readline()))
        end = time.monotonic() + 120
        while not read_metrics(tmp_path / "run/metrics.jsonl"):
            assert run.is_running()
            assert time.monotonic() < end
            time.sleep(0.05)
        every = [run, *run.children()]
        study.kill()
    assert len(every) == 3
    _, left = psutil.wait_procs(every, timeout=60)
    for process in left:
        process.kill()
    assert not left
    assert len(list_checkpoints(tmp_path / "run/checkpoints")) == 1


@pytest.mark.parametrize(
    ("options", "here", "environment", "sentence"),
    [
        ({"gpus": 8}, 0, {}, "gpus=8: this machine has no NVIDIA GPU; processes=N starts processes on its CPU"),
        ({"gpus": 8}, 4, {}, "gpus=8: this machine has 4"),
        ({"gpus": 2, "processes": 2}, 4, {}, "give only one of them"),
        ({"gpus": 2}, 4, {"RANK": "0"}, "leave them out under torchrun and srun"),
        ({"processes": 2}, 4, {"SLURM_STEP_NUM_TASKS": "2"}, "leave them out under torchrun and srun"),
    ],
)
def test_what_a_machine_cannot_start(options, here, environment, sentence, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "gpus_here", lambda: here)
    for key in ("RANK", "SLURM_STEP_NUM_TASKS"):
        monkeypatch.delenv(key, raising=False)
    for key, value in environment.items():
        monkeypatch.setenv(key, value)
    with pytest.raises(UserError, match=sentence):
        Workers.of(options)


def test_gpus_are_counted_and_ranks_placed(monkeypatch: pytest.MonkeyPatch) -> None:
    for visible, count in (("0,1,5", 3), ("", 0), ("-1", 0), ("GPU-8a", 1)):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert workers.gpus_here() == count
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,5")
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delenv("SLURM_STEP_NUM_TASKS", raising=False)
    found = Workers.of({"gpus": 2})
    assert found == Workers(2, gpu=True)
    place = Workers(2, gpu=True)._environment(1, 4000, Path("codes"))
    assert (place["RANK"], place["LOCAL_RANK"], place["WORLD_SIZE"]) == ("1", "1", "2")
    assert place["CUDA_VISIBLE_DEVICES"] == "0,1,5"
    assert Workers(2, gpu=False)._environment(1, 4000, Path("codes"))["CUDA_VISIBLE_DEVICES"] == ""
    monkeypatch.setenv(workers.WORKER, workers.GPU)
    with pytest.raises(UserError, match="torch can use no GPU here"):
        workers.check_device(False)
