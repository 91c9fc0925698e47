"""kill -9 of every process at random steps: the same command goes on, to the same bits."""

import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ssscale.train.metrics import read_metrics

ROOT = Path(__file__).resolve().parents[2]


def start(arguments: list[str]) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", f"--master_port={free_port()}"]
    command += ["launch/pretrain.py", "config=tiny_sb", *arguments]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


def free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def finish(arguments: list[str]) -> None:
    process = start(arguments)
    output, _ = process.communicate()
    assert process.returncode == 0, output[-3000:]


def kill_at(step: int, arguments: list[str], run: Path) -> None:
    """Start the run and kill -9 all its processes once a step has been logged."""
    process = start(arguments)
    while process.poll() is None and not any(r["step"] >= step for r in read_metrics(run / "metrics.jsonl")):
        time.sleep(0.02)
    assert process.poll() is None, f"the run ended before step {step}"
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


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
    assert last[-1]["valid_loss"] == read_metrics(plain / "metrics.jsonl")[-1]["valid_loss"]


def run_and_compare(steps: int, save_every: int, arguments: list[str], folder: Path, rng: random.Random) -> list[int]:
    common = [*arguments, "train.log_every=1", f"train.save_every={save_every}"]
    finish([*common, f"run_dir={folder / 'plain'}"])
    kills = sorted(rng.sample(range(2, steps), 2))
    for step in kills:
        kill_at(step, [*common, f"run_dir={folder / 'killed'}"], folder / "killed")
    finish([*common, f"run_dir={folder / 'killed'}"])
    compare(folder / "plain", folder / "killed")
    return kills


def test_a_killed_run_ends_bit_identical(corpus: Path, tmp_path: Path) -> None:
    small = ["model.num_layers=1", "model.hidden_size=32", "model.ffn_hidden_size=64", "model.num_heads=1"]
    small += ["train.batch_size=4", "train.microbatch=1", "train.eval_every=100", "train.eval_rows=4"]
    small += [f"data.path={corpus}", "train.max_steps=40"]
    run_and_compare(40, 4, small, tmp_path, random.Random())


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_main_job_killed_at_two_random_steps_ends_bit_identical(tmp_path: Path) -> None:
    """The run of `make pretrain` itself, on its data (made there)."""
    assert (ROOT / "data/stdlib/manifest.json").is_file(), "run make pretrain first"
    kills = run_and_compare(300, 50, [], tmp_path, random.Random())
    print(f"killed at steps {kills}: losses, weights and moments are bit-identical")
