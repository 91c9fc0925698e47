"""kill -9 of every process at random moments: the same command continues, to the same bits."""

import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from ssscale.train.records import read_metrics
from tests.chaos.kills import kill_all
from tests.chaos.scene import World
from tests.promises import promises
from tests.train.ranks import free_port, running
from tests.train.same import compare

ROOT = Path(__file__).resolve().parents[2]
ARGUMENTS = ["train.eval_rows=4", "train.eval_every=100", "train.save_every=4", "train.keep=1", "data.num_workers=1"]


@promises(
    "Stops and starts",
    "all processes are killed (`kill -9`) at any step, or at any moment of a save",
    seen="the next start continues the run",
    code="",
    identical="yes",
    do="run the same command again",
)
def test_a_run_killed_six_times_ends_bit_identical(corpus: Path, tmp_path: Path) -> None:
    """`make test-chaos` kills 1,000 times."""
    found = kill_all(World(tmp_path, corpus), 6, seed=random.randrange(10**6), size=2, keys=ARGUMENTS)
    assert found["kills"] == 6
    compare(tmp_path / "plain-2", tmp_path / "killed")


def torchrun(arguments: list[str]) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", f"--master_port={free_port()}"]
    command += ["launch/pretrain.py", "config=tiny_sb", *arguments]
    return subprocess.Popen(command, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


def finish(arguments: list[str]) -> None:
    process = torchrun(arguments)
    output, _ = process.communicate()
    assert process.returncode == 0, output[-3000:]


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_main_job_killed_at_two_random_steps_ends_bit_identical(tmp_path: Path) -> None:
    """The run of `make pretrain` itself, launcher included, on its data (made there)."""
    assert (ROOT / "data/stdlib/manifest.json").is_file(), "run make pretrain first"
    plain, killed = tmp_path / "plain", tmp_path / "killed"
    arguments = ["train.max_steps=300", "train.log_every=1"]
    finish([*arguments, f"run_dir={plain}"])
    for step in sorted(random.sample(range(2, 300), 2)):
        began = len(read_metrics(killed / "metrics.jsonl"))
        process = torchrun([*arguments, f"run_dir={killed}"])
        while True:
            assert process.poll() is None, f"the run ended before step {step}"
            records = read_metrics(killed / "metrics.jsonl")
            if (began == 0 or len(records) != began) and any(record["step"] >= step for record in records):
                break
            time.sleep(0.05)
        # Workers are session leaders of their own: the launcher's process group does not have them.
        for victim in [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]:
            victim.kill()
        process.communicate()
    finish([*arguments, f"run_dir={killed}"])
    compare(plain, killed)


@promises(
    "Stops and starts",
    "a rank is killed while its data workers are stuck",
    seen="the data workers end too",
    code="137",
    identical="from the last save",
    do="run the same command again",
)
def test_a_killed_rank_takes_its_workers_with_it(corpus: Path, tmp_path: Path) -> None:
    """Stopped ones stand for those that wait to hand over a batch: they do not look whether the rank is still there."""
    keys = [f"data.path={corpus}", "data.num_workers=2", "train.max_steps=2000"]
    with running(keys, tmp_path / "run", size=1) as ranks:
        ranks.wait_for_step(2)
        workers = psutil.Process(ranks.processes[0].pid).children(recursive=True)
        assert len(workers) == 2
        for worker in workers:
            worker.suspend()
        ranks.send(signal.SIGKILL)
        assert psutil.wait_procs(workers, timeout=5)[1] == []
