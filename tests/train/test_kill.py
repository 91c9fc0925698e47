"""kill -9 of every process at random steps: the same command goes on, to the same bits."""

import hashlib
import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path

import psutil
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


def kill_at(step: int, arguments: list[str], run: Path) -> int:
    """Start the run, kill -9 all its processes once it has logged a step itself; the last step that it logged."""
    began = len(read_metrics(run / "metrics.jsonl"))
    process = start(arguments)
    everyone = psutil.Process(process.pid)

    def reached() -> bool:
        records = read_metrics(run / "metrics.jsonl")
        fresh = began == 0 or len(records) != began  # a resumed run first cuts the records back
        return fresh and any(record["step"] >= step for record in records)

    while process.poll() is None and not reached():
        time.sleep(0.02)
    assert process.poll() is None, f"the run ended before step {step}"
    # Workers are session leaders of their own: the launcher's process group does not have them.
    for victim in [everyone, *everyone.children(recursive=True)]:
        victim.kill()
    process.communicate()
    last = read_metrics(run / "metrics.jsonl")[-1]["step"]
    return last


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
    kills = [
        kill_at(step, [*common, f"run_dir={folder / 'killed'}"], folder / "killed")
        for step in sorted(rng.sample(range(2, steps), 2))
    ]
    finish([*common, f"run_dir={folder / 'killed'}"])
    compare(folder / "plain", folder / "killed")
    return kills


def test_a_killed_run_ends_bit_identical(corpus: Path, tmp_path: Path) -> None:
    small = ["model.num_layers=1", "model.hidden_size=32", "model.ffn_hidden_size=64", "model.num_heads=1"]
    small += ["train.batch_size=4", "train.microbatch=1", "train.eval_every=100", "train.eval_rows=4"]
    small += [f"data.path={corpus}", "train.max_steps=60"]
    kills = run_and_compare(40, 4, small, tmp_path, random.Random())
    assert max(kills) < 60


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_main_job_killed_at_two_random_steps_ends_bit_identical(tmp_path: Path) -> None:
    """The run of `make pretrain` itself, on its data (made there)."""
    assert (ROOT / "data/stdlib/manifest.json").is_file(), "run make pretrain first"
    kills = run_and_compare(300, 50, [], tmp_path, random.Random())
    print(f"killed at steps {kills}: losses, weights and moments are bit-identical")
