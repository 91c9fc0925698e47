"""kill -9 of every process at random moments: the same command goes on, to the same bits."""

import functools
import hashlib
import importlib
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import psutil
import pytest

from ssscale.train.records import read_metrics
from tests.train.ranks import Ranks, free_port

ROOT = Path(__file__).resolve().parents[2]


def weights_of(run: Path) -> dict[str, str]:
    newest = sorted((run / "checkpoints").glob("step-*"))[-1]
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(newest.glob("*.safetensors"))}


def compare(plain: Path, killed: Path) -> None:
    """Losses of all steps and the final weights and moments, to the last bit; each step once."""
    a, b = ([r for r in read_metrics(run / "metrics.jsonl") if "loss" in r] for run in (plain, killed))
    assert [r["step"] for r in a] == [r["step"] for r in b]
    assert [r["loss"] for r in a] == [r["loss"] for r in b]
    assert weights_of(plain) == weights_of(killed)
    valid = [
        [r["valid_loss"] for r in read_metrics(run / "metrics.jsonl") if "valid_loss" in r] for run in (plain, killed)
    ]
    assert valid[0][-1:] == valid[1][-1:]


MOMENTS = {  # of a save: the function that is left by kill -9 instead of running for the n-th time
    "copy": ("ssscale.train.save", "collect", 2),
    "write": ("ssscale.train.save", "write_file", 7),
    "fsync": ("os", "fsync", 8),
    "rename": ("os", "replace", 3),
    "retention": ("ssscale.train.save", "_remove", 1),
}


def die_at(moment: str) -> None:
    """Plant the end of this process, if it is the main rank, in the middle of a save."""
    module_name, name, count = MOMENTS[moment]
    module = importlib.import_module(module_name)
    original, calls = getattr(module, name), []

    def dying(*arguments: Any, **more: Any) -> Any:
        calls.append(1)
        if len(calls) == count and os.environ["RANK"] == "0":
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*arguments, **more)

    setattr(module, name, dying)


def kill_often(kills: int, steps: int, arguments: list[str], run: Path) -> Counter[str]:
    """Start the run, kill -9 all of it at a random step or within a save, and so on; how often which moment was met."""
    met: Counter[str] = Counter()
    for number in range(kills):
        moment = random.choice([*MOMENTS, "step"])
        plant = None if moment == "step" else functools.partial(die_at, moment)
        ranks = Ranks([*arguments, f"train.max_steps={steps}"], run, plant=plant)
        first = ranks.records()[-1]["step"] if ranks.records() else 0
        target = min(first + random.randrange(2, 12), steps - 1)
        end = time.monotonic() + 60
        while all(process.is_alive() for process in ranks.processes) and time.monotonic() < end:
            records = ranks.records()
            if plant is None and records and records[-1]["step"] >= target:
                break
            time.sleep(0.01)
        codes = [process.exitcode for process in ranks.processes]
        if codes == [0, 0]:
            return met
        assert codes[0] in (None, -signal.SIGKILL), f"kill {number}, {moment}: {codes}\n{ranks.output()[-3000:]}"
        met[moment] += 1
        ranks.kill()
    return met


ARGUMENTS = ["train.eval_rows=4", "train.eval_every=100", "train.save_every=4", "train.keep=1", "data.num_workers=1"]


def check_kills(kills: int, steps: int, corpus: Path, folder: Path) -> Counter[str]:
    arguments = [f"data.path={corpus}", *ARGUMENTS]
    Ranks([*arguments, f"train.max_steps={steps}"], folder / "plain").finish()
    met = kill_often(kills, steps, arguments, folder / "killed")
    Ranks([*arguments, f"train.max_steps={steps}"], folder / "killed").finish()
    compare(folder / "plain", folder / "killed")
    return met


def test_a_run_killed_ten_times_ends_bit_identical(corpus: Path, tmp_path: Path) -> None:
    met = check_kills(10, 100, corpus, tmp_path)
    assert sum(met.values()) == 10


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_a_run_killed_a_hundred_times_ends_bit_identical(corpus: Path, tmp_path: Path) -> None:
    met = check_kills(100, 1000, corpus, tmp_path)
    print(f"killed {sum(met.values())} times: {dict(met)}; losses, weights and moments are bit-identical")


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
