"""Training jobs on a real Slurm of two nodes on this machine (cluster.sh), and what happens to nodes, cables and ranks."""

import json
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from ssscale.train.checkpoint_folder import list_checkpoints, verify
from tests.promises import promises
from tests.slurm.jobs import ARGUMENTS, Job, cluster, losses, started, submit
from tests.train.ranks import SMALL, Ranks

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(900)]
PREEMPTION = """PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmctldParameters=preempt_send_user_signal
PartitionName=urgent Nodes=ALL PriorityTier=9 MaxTime=INFINITE State=UP"""
STEPS = 160


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with started(tmp_path_factory, SLURM_EXTRA_CONF=PREEMPTION):
        yield


@pytest.fixture(scope="module")
def plain(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The losses of an uninterrupted run on two ranks."""
    run = tmp_path_factory.mktemp("plain") / "run"
    Ranks([*ARGUMENTS, f"data.path={corpus}", f"train.max_steps={STEPS}"], run).finish()
    return losses(run)


def test_a_job_completes_and_is_recorded(slurm: None, corpus: Path, plain: list[float], tmp_path: Path) -> None:
    job = Job(tmp_path / "run", corpus)
    job.finish()
    assert losses(job.run) == plain
    assert f"job {job.number}: finished" in job.log()
    saved = json.loads((job.run / f"slurm-{job.number}.json").read_text())
    assert len(saved["commit"]) == 40
    assert f"run_dir={job.run}" in saved["command"]


def requeue(job: Job) -> None:
    subprocess.run(["scontrol", "requeue", job.number], check=True)


def early_signal(job: Job) -> None:
    subprocess.run(["scancel", "--signal=USR1", "--batch", job.number], check=True)


def kill_a_rank(job: Job) -> None:
    command = [sys.executable, "launch/pretrain.py"]
    found = [process for process in psutil.process_iter(["cmdline"]) if (process.info["cmdline"] or [])[:2] == command]
    max((process for process in found if f"run_dir={job.run}" in process.info["cmdline"]), key=lambda p: p.pid).kill()


def preempt(job: Job) -> None:
    command = ["sbatch", "-p", "urgent", "-N2", "--ntasks-per-node=8", "--output=/dev/null", "--wrap", "sleep 3"]
    subprocess.run(command, check=True, capture_output=True)


def crash(job: Job) -> None:
    cluster("crash", "2")
    job.wait_for(lambda: job.field("Restarts") == "1", "restart after the crash")
    cluster("boot", "2")


def unplug(job: Job) -> None:
    cluster("unplug", "2")
    job.wait_for(lambda: job.field("Restarts") == "1", "restart after the cable was pulled")
    cluster("plug", "2")


@promises(
    "Slurm",
    "the job gets the early signal",
    seen="the job saves and queues itself again; the next start continues",
    code="",
    identical="losses",
)
@promises(
    "Slurm",
    "`scontrol requeue`",
    seen="the next start continues from the last checkpoint",
    code="",
    identical="losses",
)
@promises(
    "Slurm",
    "a job of another partition preempts the job",
    seen="the job gets the early signal, saves and is queued again; it continues after the other job",
    code="",
    identical="losses",
)
@promises(
    "Slurm",
    "one rank is killed",
    seen="srun ends with 137; the job queues itself again and continues",
    code="",
    identical="losses",
)
@promises(
    "Slurm",
    "a node crashes",
    seen="the ranks of the other node end with code 76; Slurm queues the job again because a node failed",
    code="",
    identical="losses",
)
@promises(
    "Slurm",
    "the network cable of a node is pulled",
    seen="after `SlurmdTimeout`, Slurm marks the node as down and queues the job again",
    code="",
    identical="losses",
    do="plug the cable in",
)
@pytest.mark.parametrize("fault", [requeue, early_signal, kill_a_rank, preempt, crash, unplug])
def test_a_job_gets_over(
    fault: Callable[[Job], None],
    slurm: None,
    corpus: Path,
    plain: list[float],
    tmp_path: Path,
) -> None:
    job = Job(tmp_path / "run", corpus)
    job.wait_for_step(30)
    began = time.monotonic()
    fault(job)
    job.finish()
    assert losses(job.run) == plain
    assert int(job.field("Restarts")) >= 1, job.log()  # a node that boots late may cost a second one
    print(f"{fault.__name__}: finished {time.monotonic() - began:.0f} s after it; {job.log().splitlines()[-1]}")


@promises(
    "Slurm",
    "the job comes near its time limit",
    seen="Slurm sends the early signal; the job saves and queues itself again",
    code="",
    identical="losses",
)
@pytest.mark.timeout(2400)
def test_the_time_limit(slurm: None, corpus: Path, tmp_path: Path) -> None:
    """Once the job trains, its limit comes near: with 60 to 120 s left, the signal is due 90 s before, or a minute sooner."""
    steps, early = 1200, 90
    job = Job(tmp_path / "run", corpus, "time=01:00:00", f"early={early}", steps=steps)
    job.wait_for_step(30)
    hours, minutes, seconds = map(int, job.field("RunTime").split(":"))
    limit = 60 * hours + minutes + (early + seconds) // 60 + 1
    subprocess.run(["scontrol", "update", f"JobId={job.number}", f"TimeLimit={limit}"], check=True)
    job.wait_for(lambda: int(job.field("Restarts")) >= 1, "restart at the time limit")
    subprocess.run(["scontrol", "update", f"JobId={job.number}", "TimeLimit=60"], check=True)
    job.finish()
    assert "saved on a signal, queued again" in job.log()
    assert "TIME LIMIT" not in job.log()
    run = tmp_path / "plain"
    Ranks([*ARGUMENTS, f"data.path={corpus}", f"train.max_steps={steps}"], run).finish()
    assert losses(job.run) == losses(run)


@promises(
    "Slurm",
    "`scancel`",
    seen="the job saves and stays cancelled",
    code="",
    do="run the same command to continue",
)
def test_a_cancelled_job_saves_and_stays_cancelled(slurm: None, corpus: Path, tmp_path: Path) -> None:
    job = Job(tmp_path / "run", corpus, steps=100_000)
    job.wait_for_step(25)
    subprocess.run(["scancel", job.number], check=True)
    job.wait_for(lambda: job.field("JobState") == "CANCELLED", "end of the cancelled job")
    time.sleep(10)
    assert (job.field("JobState"), job.field("Restarts")) == ("CANCELLED", "0")
    assert "SIGTERM; step" in job.log()
    assert verify(list_checkpoints(job.run / "checkpoints")[-1]) is None


def test_what_follows_a_job(slurm: None, corpus: Path, tmp_path: Path) -> None:
    """An evaluation after a training that finished; none after one that failed."""
    more = ["evaluate_gpus=2", "evaluate_time=00:20:00", "evaluate_cpus=2", "evaluate_mem=3G"]
    good = Job(tmp_path / "run", corpus, "evaluate=none", *more, steps=20)
    (follower,) = good.followers
    fields = {name: good.field(name, follower) for name in ("TimeLimit", "NumTasks", "CPUs/Task", "MinMemoryNode")}
    assert fields == {"TimeLimit": "00:20:00", "NumTasks": "2", "CPUs/Task": "2", "MinMemoryNode": "3G"}
    good.finish()
    good.wait_for(lambda: good.field("JobState", good.followers[0]) == "COMPLETED", "evaluation")
    (results,) = (tmp_path / "run/eval").glob("step-*.json")
    assert results.name == "step-00000020.json"
    assert json.loads(results.read_text())["valid"]
    bad = Job(tmp_path / "bad", corpus.parent, "evaluate=none", steps=20)
    bad.wait_for(lambda: bad.field("JobState") == "FAILED", "failure")
    assert "error: " in bad.log()
    assert "something has to be changed first" in bad.log()
    bad.wait_for(lambda: bad.field("JobState", bad.followers[0]) == "CANCELLED", "end of what cannot start")


@promises(
    "Slurm",
    "the partition does not exist, or has fewer nodes than the job asks for",
    seen="`Slurm refuses the job: … invalid partition specified: nowhere`",
    code="2",
    do="follow the message",
)
@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["partition=nowhere"], "Slurm refuses the job: .*invalid partition specified: nowhere"),
        (["nodes=5"], "Slurm refuses the job: .*(node count|Requested node configuration)"),
    ],
)
def test_what_slurm_refuses_is_passed_on(slurm: None, options: list[str], sentence: str, tmp_path: Path) -> None:
    result = submit(*SMALL, f"run_dir={tmp_path / 'run'}", "nodes=2", "gpus=1", "train.batch_size=20", *options)
    assert result.returncode == 2, result.stdout + result.stderr
    assert re.search(sentence, result.stderr), result.stderr
