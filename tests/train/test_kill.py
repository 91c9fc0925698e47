"""kill -9 of every process at random moments: the same command goes on, to the same bits."""

import hashlib
import json
import random
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from ssscale.train.metrics import read_metrics
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
    last = [json.loads(line) for line in (killed / "metrics.jsonl").read_text().splitlines()]
    assert last[-1].get("valid_loss") == read_metrics(plain / "metrics.jsonl")[-1].get("valid_loss")


def test_a_run_killed_ten_times_ends_bit_identical(corpus: Path, tmp_path: Path) -> None:
    arguments = [f"data.path={corpus}", "train.max_steps=60", "train.save_every=4", "train.eval_rows=4"]
    arguments += ["train.eval_every=100"]
    Ranks(arguments, tmp_path / "plain").finish()
    for step in sorted(random.sample(range(2, 56), 10)):
        ranks = Ranks(arguments, tmp_path / "killed")
        ranks.wait_for_step(step)
        ranks.kill()
    Ranks(arguments, tmp_path / "killed").finish()
    compare(tmp_path / "plain", tmp_path / "killed")


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
