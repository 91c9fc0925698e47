"""Signals, the lock of a run folder, and what launchers pass on."""

import functools
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from launch.process import rank_environment
from ssscale.errors import UserError
from ssscale.train.checkpoint_folder import list_checkpoints
from ssscale.train.faults import open_events, write_start
from ssscale.train.lock import RunLock
from tests.promises import promises
from tests.train import disks
from tests.train.faults import all_events
from tests.train.ranks import SMALL, Ranks, free_port, running, state_of

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def arguments(corpus: Path) -> list[str]:
    return [f"data.path={corpus}", "train.save_every=1000"]


@promises(
    "Stops and starts",
    "one rank gets SIGUSR1, SIGTERM or SIGINT, or SIGHUP because its terminal is closed (not under `nohup`)",
    seen="all ranks save the same step and end: `… is saved, the same command continues`",
    code="75",
    identical="yes",
    do="run the same command again",
)
@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_to_one_rank_saves_and_says_why(number: signal.Signals, arguments: list[str], tmp_path: Path) -> None:
    with running([*arguments, "train.max_steps=2000"], tmp_path / "run") as ranks:
        ranks.wait_for_step(3)
        ranks.send(number, rank=1)
        ranks.send(number, rank=1)  # torchrun under srun delivers it twice
        assert ranks.wait() == [75, 75]
    last = ranks.records()[-1]["step"]
    (checkpoint,) = list_checkpoints(tmp_path / "run/checkpoints")
    assert state_of(checkpoint)["step"] == last
    assert f"step {last} is saved, the same command continues" in ranks.output()
    assert not (tmp_path / "run/run.lock").exists()
    again = Ranks([*arguments, f"train.max_steps={last + 2}"], tmp_path / "run")
    again.finish()
    assert f"resumed from {checkpoint} (step {last})" in again.output()
    first, second = all_events(tmp_path / "run")
    assert first | {"time": ""} == {"time": "", "event": "start", "step": 0, "ranks": 2, "host": socket.gethostname()}
    assert (second["event"], second["step"], second["checkpoint"]) == ("start", last, checkpoint.name)
    Ranks([*arguments, f"train.max_steps={last + 2}"], tmp_path / "run").finish()
    assert len(all_events(tmp_path / "run")) == 2  # a finished run trains nothing


def test_the_record_of_a_start_names_the_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_RESTART_COUNT", "2")
    log = open_events(tmp_path)
    write_start(log, 4, 8, tmp_path / "checkpoints/step-00000004", "4711")
    log.close()
    (event,) = all_events(tmp_path)
    assert (event["job"], event["restarts"], event["checkpoint"]) == ("4711", "2", "step-00000004")


@promises(
    "Stops and starts",
    "the run gets SIGUSR1, SIGTERM or SIGINT while it starts",
    seen="it ends: `… before the first step; the same command starts the run`",
    code="75",
    identical="yes",
    do="run the same command again",
)
def test_a_signal_during_the_start_stops_before_the_first_step(arguments: list[str], tmp_path: Path) -> None:
    with running([*arguments, "train.max_steps=2000"], tmp_path / "run") as ranks:
        ranks.wait_for(lambda: bool(ranks.output()))  # the first line of the log, before the model is built
        ranks.send(signal.SIGUSR1)
        assert ranks.wait() == [75, 75]
    assert "SIGUSR1 before the first step; the same command starts the run" in ranks.output()
    assert not list_checkpoints(tmp_path / "run/checkpoints")
    again = Ranks([*arguments, "train.max_steps=2"], tmp_path / "run")
    again.finish()
    assert again.records()[-1]["step"] == 2


def stop_slowly() -> None:
    from ssscale.train.hooks.checkpointing import Checkpointing

    Checkpointing.save = lambda self, run, wait=False: time.sleep(60)  # type: ignore[assignment, method-assign]


@promises(
    "Stops and starts",
    "the run gets a second SIGTERM or SIGINT while it stops",
    seen="it ends at once, without a save",
    code="128 + signal",
    identical="from the last save",
    do="run the same command again",
)
def test_a_second_signal_leaves_at_once(arguments: list[str], tmp_path: Path) -> None:
    with running([*arguments, "train.max_steps=2000"], tmp_path / "run", plant=stop_slowly) as ranks:
        ranks.wait_for_step(2)
        ranks.send(signal.SIGTERM)
        time.sleep(1.5)
        ranks.send(signal.SIGTERM)
        ranks.processes[0].join(5)
        assert ranks.processes[0].exitcode == 128 + signal.SIGTERM


@promises(
    "Stops and starts",
    "a second run starts in a folder that a run uses",
    seen="the second run ends: `… is in use by process 4711 on node3`; the first run continues",
    code="2",
    do="wait for the first run, stop it, or give another `run_dir`",
)
def test_a_folder_in_use_is_refused(arguments: list[str], tmp_path: Path) -> None:
    with running([*arguments, "train.max_steps=2000"], tmp_path / "run", size=1) as first:
        first.wait_for_step(1)
        with running([*arguments, "train.max_steps=2000"], tmp_path / "run", size=1) as second:
            assert second.wait() == [2]
        sentence = f"run is in use by process {first.processes[0].pid} on {socket.gethostname()}"
        assert sentence in second.output()
        step = first.records()[-1]["step"]
        first.wait_for(lambda: first.records()[-1]["step"] > step)


def in_another_clock(stat: Path) -> None:
    """To plant: the kernel tells this process another time of its boot, as it does after the clock was set."""
    disks.own_mounts()
    disks.replace_file(Path("/proc/stat"), stat)


def test_a_folder_in_use_is_refused_after_the_clock_was_set(arguments: list[str], tmp_path: Path) -> None:
    disks.needs_mounts()
    stat = tmp_path / "stat"
    lines = Path("/proc/stat").read_text().splitlines()
    later = [f"btime {int(line.split()[1]) + 3600}" if line.startswith("btime") else line for line in lines]
    stat.write_text("\n".join(later) + "\n")
    with running([*arguments, "train.max_steps=2000"], tmp_path / "run", size=1) as first:
        first.wait_for_step(1)
        lock = (tmp_path / "run/run.lock").read_bytes()
        plant = functools.partial(in_another_clock, stat)
        with running([*arguments, "train.max_steps=2000"], tmp_path / "run", size=1, plant=plant) as second:
            assert second.wait() == [2]
        assert f"run is in use by process {first.processes[0].pid} on {socket.gethostname()}" in second.output()
        assert (tmp_path / "run/run.lock").read_bytes() == lock


@promises(
    "Stops and starts",
    "a run that was killed has left its lock (`run.lock`)",
    seen=(
        "The new run takes the lock over. If the old run was on the same host, and the host has not booted since, its process "
        "must be gone. If the old run was an earlier start of the same Slurm job, the lock is taken at once. In all other "
        "cases, also if the file is broken, the new run waits until nothing has touched the lock for 15 s."
    ),
    code="",
)
def test_a_stale_lock_is_taken_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dead = subprocess.Popen(["true"])
    dead.wait()
    monkeypatch.setattr("ssscale.train.lock.SILENT_S", 1.2)
    ours = RunLock(tmp_path, slurm_job="7").owner
    elsewhere = ours | {"host": "far", "machine": "far/pid:[1]"}
    for other in (
        ours | {"pid": dead.pid},  # gone
        ours | {"started": 1.0},  # its number now belongs to another process
        elsewhere | {"slurm_restarts": "1"},  # another start of this Slurm job
        elsewhere | {"slurm_job": "6"},  # silent
    ):
        (tmp_path / "run.lock").write_text(json.dumps(other))
        lock = RunLock(tmp_path, slurm_job="7")
        lock.acquire()
        assert json.loads((tmp_path / "run.lock").read_text()) == lock.owner
        lock.release()
        assert not list(tmp_path.iterdir())


def test_a_lock_that_is_touched_from_elsewhere_is_alive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ssscale.train.lock.HEARTBEAT_S", 0.2)
    other = RunLock(tmp_path, slurm_job="7")  # another step of the same start of the job
    other.owner |= {"host": "far", "machine": "far/pid:[1]"}
    other.acquire()
    with pytest.raises(UserError, match=f"in use by process {os.getpid()} on far"):
        RunLock(tmp_path, slurm_job="7").acquire()
    other.release()


@promises(
    "Stops and starts",
    "only torchrun is killed",
    seen="the ranks get SIGTERM, save and end",
    code="75",
    do="run the same command again",
)
def test_workers_stop_when_torchrun_is_killed_alone(arguments: list[str], tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", f"--master_port={free_port()}"]
    command += ["launch/pretrain.py", *SMALL, *arguments, "train.max_steps=100000", f"run_dir={tmp_path / 'run'}"]
    launcher = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    end = time.monotonic() + 120
    metrics = tmp_path / "run/metrics.jsonl"
    while not (metrics.is_file() and metrics.stat().st_size):
        assert launcher.poll() is None
        assert time.monotonic() < end
        time.sleep(0.1)
    workers = psutil.Process(launcher.pid).children(recursive=True)
    launcher.kill()
    launcher.wait()
    _, left = psutil.wait_procs(workers, timeout=30)
    assert not left
    assert len(list_checkpoints(tmp_path / "run/checkpoints")) == 1  # and they saved


def test_ranks_come_from_srun_only(monkeypatch: pytest.MonkeyPatch) -> None:
    job = {"SLURM_JOB_ID": "12345", "SLURM_PROCID": "9", "SLURM_LOCALID": "1"}
    assert rank_environment(job) == {}  # a batch script
    step = job | {"SLURM_STEP_NUM_TASKS": "16", "SLURM_STEP_NODELIST": "gpu[003-004]"}
    assert rank_environment(step | {"RANK": "0"}) == {}  # torchrun inside a task
    assert rank_environment(step | {"MASTER_ADDR": "gpu003"}) == {
        "RANK": "9",
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "16",
        "MASTER_ADDR": "gpu003",
        "MASTER_PORT": "22345",
    }
    assert rank_environment(step | {"MASTER_ADDR": "head", "MASTER_PORT": "1"})["MASTER_PORT"] == "1"
    monkeypatch.setenv("PATH", "/nowhere")  # tests/slurm asks a real scontrol
    with pytest.raises(
        UserError, match=r"first host of gpu\[003-004\] \(no scontrol on this machine\): set MASTER_ADDR"
    ):
        rank_environment(step)
