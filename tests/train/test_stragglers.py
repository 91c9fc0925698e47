"""A rank that computes longer than the others is named, with its host; ranks that are alike are not."""

import os
import random
import socket
import statistics
import time
from collections.abc import Callable
from functools import partial
from itertools import repeat
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from ssscale.config.schema import TrainConfig
from ssscale.parallel.groups import Groups
from ssscale.train.hooks.standard import standard_hooks
from ssscale.train.hooks.stragglers import LIMIT, Stragglers, halves, own_seconds, ratios, verdict
from tests.train.ranks import Ranks, running

SLEEP = 0.1  # seconds per forward pass


class Clock:
    """Seconds that this process computed, slept or waited for another, without those for which it had no core."""

    def __init__(self) -> None:
        self.idle = 0.0

    def perf_counter(self) -> float:
        return time.thread_time() + self.idle

    def counted(self, waiting: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any, **more: Any) -> Any:
            began = time.perf_counter()
            result = waiting(*arguments, **more)
            self.idle += time.perf_counter() - began
            return result

        return timed


def computing() -> tuple[type, str]:
    from ssscale.model.decoder import Decoder

    return Decoder, "forward"


def reading() -> tuple[type, str]:
    from ssscale.data.stream import _Microbatches

    return _Microbatches, "__getitem__"


def plant(slow: dict[int, float], sleeps: Callable[[], tuple[type, str]]) -> None:
    """Makes every forward pass, or every read of a microbatch, sleep for SLEEP times the rank's factor."""
    from ssscale.train import clock

    shown = Clock()
    clock.time = shown  # type: ignore[attr-defined]
    dist.all_reduce = shown.counted(dist.all_reduce)
    place, name = sleeps()
    sleep, whole = shown.counted(time.sleep), getattr(place, name)
    seconds = SLEEP * slow.get(int(os.environ["RANK"]), 1.0)

    def slept(*arguments: Any, **more: Any) -> Any:
        sleep(seconds)
        return whole(*arguments, **more)

    setattr(place, name, slept)


def trained(
    corpus: Path,
    folder: Path,
    slow: dict[int, float],
    *keys: str,
    sleeps: Callable[[], tuple[type, str]] = computing,
) -> Ranks:
    arguments = [f"data.path={corpus}", "data.num_workers=0", "train.max_steps=12", "train.straggler_every=6"]
    with running([*arguments, *keys], folder / "run", size=4, plant=partial(plant, slow, sleeps)) as ranks:
        ranks.finish()
    return ranks


def comparisons(ranks: Ranks) -> list[dict[str, Any]]:
    return [record for record in ranks.records() if "straggler/ratio" in record]


def test_one_of_four_ranks_sleeps_and_is_named_within_the_interval(corpus: Path, tmp_path: Path) -> None:
    ranks = trained(corpus, tmp_path, {2: 2.0})
    found, host = comparisons(ranks), socket.gethostname()
    assert [record["step"] for record in found] == [6, 12]
    for record in found:
        assert record["straggler/rank"] == 2
        assert record["stragglers"] == f"rank 2 on {host} ({record['straggler/ratio']:.2f})"
        assert record["straggler/ratio"] == pytest.approx(2.0, abs=0.5)
        assert record["seconds/compute"] > SLEEP
    assert f"step 6: rank 2 on {host} takes " in ranks.output()
    assert ranks.output().count(" times as long to compute a step as the others") == 2


def test_a_rank_that_waits_for_its_data_is_named(corpus: Path, tmp_path: Path) -> None:
    ranks = trained(corpus, tmp_path, {2: 2.0}, "train.max_steps=6", sleeps=reading)
    (record,), host = comparisons(ranks), socket.gethostname()
    assert record["stragglers"] == f"rank 2 on {host} ({record['straggler/ratio']:.2f})"
    assert record["straggler/ratio"] == pytest.approx(2.0, abs=0.5)
    assert f"step 6: rank 2 on {host} takes " in ranks.output()
    assert " s of it waiting for data: look at the disks and CPUs of its host" in ranks.output()


def test_nobody_is_named_if_all_sleep_alike(corpus: Path, tmp_path: Path) -> None:
    ranks = trained(corpus, tmp_path, {})
    found = comparisons(ranks)
    assert [record["step"] for record in found] == [6, 12]
    assert [record.get("stragglers") for record in found] == [None, None]
    assert "times as long to compute" not in ranks.output()


def test_tensor_parallel_ranks_are_named_together(corpus: Path, tmp_path: Path) -> None:
    """Each waits for the other within its passes, so that both look slow."""
    ranks = trained(corpus, tmp_path, {3: 2.0}, "parallel.tensor=2", "model.num_heads=2", "train.max_steps=6")
    (found,) = comparisons(ranks)
    assert found["stragglers"].partition(" on ")[0] == "one of rank 2, 3"


def test_a_layout_whose_ranks_cannot_be_compared_says_so(corpus: Path, tmp_path: Path) -> None:
    ranks = trained(corpus, tmp_path, {2: 2.0}, "parallel.zero_stage=3", "train.max_steps=6")
    assert comparisons(ranks) == []
    assert ranks.output().count("ranks of this layout wait for each other too often to be compared") == 1


def test_one_rank_has_no_such_hook(groups: Groups, monkeypatch: pytest.MonkeyPatch) -> None:
    def installed(interval: int) -> bool:
        return any(isinstance(hook, Stragglers) for hook in standard_hooks(TrainConfig(straggler_every=interval)))

    assert (groups.world_size, installed(100)) == (1, False)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    assert (installed(100), installed(0)) == (True, False)


def test_waiting_for_others_does_not_count() -> None:
    marks = list(zip(("forward", "backward", "forward", "backward", "communication", "optimizer"), (0, 1, 3, 4, 6, 16)))
    assert own_seconds(marks, ("forward", "backward"), cuda=False) == 6
    assert own_seconds(marks, ("forward",), cuda=False) == 2


def test_both_halves_count() -> None:
    assert halves([1, 2, 3, 10, 20, 30]) == (2, 20)
    assert halves([1, 2, 30]) == (1.5, 16)
    assert halves([7]) == (7, 7)
    assert ratios({0: (1, 1), 1: (2, 3), 2: (1, 1)}) == {0: pytest.approx(1 / 2), 1: 2, 2: pytest.approx(1 / 2)}
    assert ratios({0: (1, 1), 1: (5, 1.1)})[1] == pytest.approx(1.1)  # slow in one half only


@pytest.mark.parametrize("size", [2, 3, 4, 9, 10])
def test_a_rank_is_compared_with_the_median_of_the_others(size: int) -> None:
    numbers = random.Random(size)
    seconds = {rank: (numbers.choice((1.0, 2.0, 5.0, 7.0)), numbers.random()) for rank in range(size)}
    for rank, ratio in ratios(seconds).items():
        others = [other for key, other in seconds.items() if key != rank]
        medians = [statistics.median(half) for half in zip(*others, strict=True)]
        assert ratio == pytest.approx(min(own / median for own, median in zip(seconds[rank], medians, strict=True)))


def test_noise_names_nobody_and_hides_nobody() -> None:
    """Steps whose times vary by 30 %, some of which take ten times as long, on 256 ranks."""
    numbers = random.Random(0)

    def steps(factor: float) -> list[float]:
        return [factor * numbers.gauss(1, 0.3) * (10 if numbers.random() < 0.02 else 1) for _ in repeat(None, 100)]

    for slow in (None, 77):
        found = [(rank, *halves(steps(1.3 if rank == slow else 1)), f"host{rank // 8}", 0.0) for rank in range(256)]
        record = verdict(found, 100)
        assert record.get("stragglers", "").partition(" (")[0] == ("" if slow is None else "rank 77 on host9")
        if slow is not None:
            assert (record["straggler/rank"], record["straggler/ratio"] > LIMIT) == (77, True)


@pytest.mark.parametrize(("waits", "said"), [(0.6, "look at the clock"), (0.8, "0.8 s of it waiting for data")])
def test_what_all_ranks_wait_for_is_not_the_reason(waits: float, said: str, caplog: pytest.LogCaptureFixture) -> None:
    found = [(rank, 0.9, 0.9, "here", 0.6) for rank in range(3)] + [(3, 1.15, 1.15, "there", waits)]
    with caplog.at_level("WARNING", "ssscale"):
        verdict(found, 6)
    (record,) = caplog.records
    assert said in record.message


@pytest.mark.gpu
def test_a_rank_that_shares_its_gpu_is_named(corpus: Path, tmp_path: Path) -> None:
    """Needs two GPUs: `python -m pytest -m gpu tests/train/test_stragglers.py`.

    The steps are large. In small ones the GPU waits for the host, and has time for the other process.
    """
    import subprocess
    import sys

    import torch

    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    busy = "import torch\nx = torch.randn(8192, 8192, device='cuda:1', dtype=torch.bfloat16)\n"
    busy += "print(float((x @ x)[0, 0]), flush=True)\nwhile True: x @ x"
    other = subprocess.Popen([sys.executable, "-c", busy], stdout=subprocess.PIPE)
    assert other.stdout is not None
    assert other.stdout.readline(), "the other process does not compute"
    run = tmp_path / "run"
    command = [sys.executable, "launch/pretrain.py", "config=162m_softmax", "gpus=2", f"data.path={corpus}"]
    command += ["data.length=256", "train.batch_size=512", "train.microbatch=256", "train.max_steps=30"]
    command += ["train.straggler_every=30", "train.eval_every=0", "train.save_every=0", f"run_dir={run}"]
    try:
        done = subprocess.run(command, cwd=Path(__file__).resolve().parents[2], capture_output=True, text=True)
        assert other.poll() is None, "the other process ended before the run did"
    finally:
        other.kill()
        other.wait()
    assert done.returncode == 0, done.stderr
    from ssscale.train.records import read_metrics

    (record,) = [record for record in read_metrics(run / "metrics.jsonl") if "straggler/ratio" in record]
    assert record.get("stragglers", "").startswith("rank 1 on "), record
    print(record["stragglers"])
