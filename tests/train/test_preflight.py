"""The checks before a run: what is slow is named, what is broken is refused. Ranks are gloo processes with planted faults."""

import itertools
import logging
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from ssscale.config.choices import Auto
from ssscale.errors import STALLED, Stop, UserError
from ssscale.parallel.groups import Groups
from ssscale.train import preflight as module
from ssscale.train.preflight import Sizes, check_device, preflight, report, rounds, slow, wanted
from tests.distributed.jobs import regroup
from tests.pool import Pool
from tests.train.ranks import running

NAMES = itertools.count()


class Heard(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def slept(work: Any, seconds: float, awake: threading.Event | None = None) -> Any:
    """awake: ends the sleep."""

    def late(*arguments: Any, **more: Any) -> Any:
        (awake or threading.Event()).wait(seconds)
        return work(*arguments, **more)

    return late


def spoiled(work: Any, value: float) -> Any:
    def wrong(*arguments: Any, **more: Any) -> Any:
        result: Tensor = work(*arguments, **more)
        result.view(-1)[17] = value
        return result

    return wrong


def plant(fault: str, patch: pytest.MonkeyPatch, awake: threading.Event) -> None:
    """Breaks something on this rank. awake: ends an exchange that hangs."""
    faults: dict[str, tuple[Any, str, Any]] = {
        "slow products": (module, "multiply", slept(module.multiply, 0.1)),
        "slow copies": (module, "copy", slept(module.copy, 0.3)),
        "slow exchange": (dist, "all_reduce", slept(dist.all_reduce, 0.3)),
        "wrong product": (module, "multiply", spoiled(module.multiply, 1000.0)),
        "NaN": (module, "multiply", spoiled(module.multiply, float("nan"))),
        "wrong copy": (module, "copy", spoiled(module.copy, 3)),
        "wrong sum": (dist, "all_reduce", lambda x, **more: spoiled(lambda: all_reduced(x, **more), 0.5)()),
        "hangs": (dist, "all_reduce", slept(dist.all_reduce, 6.0, awake)),
        "late": (module, "hostname", slept(module.hostname, 6.0)),
    }
    if fault:
        patch.setattr(*faults[fault])


ALL_REDUCE = dist.all_reduce


def all_reduced(x: Tensor, **more: Any) -> Tensor:
    ALL_REDUCE(x, **more)
    return x


def checked(planted: dict[int, str], per_node: int, name: str, answer_s: float = 60.0) -> tuple[str, int, list[str]]:
    """Runs preflight with these faults by rank. Returns its error, the code of a Stop, and what it has logged."""
    groups, heard, store, awake = regroup(1), Heard(), module._get_default_store(), threading.Event()
    logger = logging.getLogger("ssscale")
    level = logger.level
    logger.setLevel(logging.INFO)
    logger.addHandler(heard)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_get_default_store", lambda: dist.PrefixStore(name, store))
        # Groups of the same ranks have the same name, and here many runs share one store.
        patch.setattr(distributed_c10d, "_hash_ranks_to_str", lambda ranks: f"{name} {ranks}")
        patch.setattr(module, "hostname", lambda: f"node{groups.rank // per_node}")
        patch.setattr(module, "MEASURE_S", 0.2)
        patch.setattr(module, "EXCHANGES", 3)
        patch.setattr(module, "ANSWER_S", answer_s)
        plant(planted.get(groups.rank, ""), patch, awake)
        try:
            preflight(True, groups)
        except UserError as error:
            return str(error), 2, heard.lines
        except Stop as stop:
            return str(stop), stop.code, heard.lines
        finally:
            logger.removeHandler(heard)
            logger.setLevel(level)
            awake.set()
            time.sleep(0 if answer_s == 60 else 1)  # until what was planted has ended
    return "", 0, heard.lines


def run(pool: Pool, planted: dict[int, str], per_node: int = 2, answer_s: float = 60.0) -> list[Any]:
    name = f"test{next(NAMES)}"
    return pool.run(
        "tests.train.test_preflight:checked", planted=planted, per_node=per_node, name=name, answer_s=answer_s
    )


@pytest.mark.parametrize(
    ("fault", "per_node", "named"),
    [
        ("slow products", 2, "preflight: rank 2 on node1: matrix products at 0."),
        ("slow copies", 2, "preflight: rank 2 on node1: memory copies at 0."),
        ("slow exchange", 2, "preflight: node1: all-reduce within a node at 0."),
        ("slow exchange", 1, "preflight: node2: all-reduce between nodes at 0."),
    ],
)
def test_what_is_slow_is_named_and_not_refused(pool4: Pool, fault: str, per_node: int, named: str) -> None:
    for error, _, lines in run(pool4, {2: fault}, per_node):
        assert error == ""
        assert any(line.startswith(named) for line in lines), lines
        assert lines[0].startswith("preflight in ")
        assert float(lines[0].split()[2]) < 20


@pytest.mark.parametrize(
    ("fault", "refused"),
    [
        ("wrong product", "of its device fails on rank 1 on node0: wrong results of a matrix product: exclude"),
        ("NaN", "of its device fails on rank 1 on node0: wrong results of a matrix product: exclude"),
        ("wrong copy", "of its device fails on rank 1 on node0: wrong bytes after a copy in memory: exclude"),
        ("wrong sum", "within its node fails on rank 1 on node0: a wrong sum of an all-reduce over 2 ranks: exclude"),
    ],
)
def test_what_is_broken_is_refused(pool4: Pool, fault: str, refused: str) -> None:
    for error, code, _ in run(pool4, {1: fault}):
        assert refused in error
        assert code == 2


def test_ranks_whose_exchange_hangs_are_refused(pool4: Pool) -> None:
    for error, code, _ in run(pool4, {3: "hangs"}, answer_s=4.0):
        assert "all-reduce within its node fails on rank 2 on node1: no end within 2 s, rank 3 on node1: no" in error
        assert code == 2


def test_a_rank_that_does_not_come_is_named(pool4: Pool) -> None:
    for error, code, _ in run(pool4, {2: "late"}, answer_s=3.0):
        assert "preflight: no answer within 3 s from rank 2 (start)" in error
        assert code == STALLED


def test_everything_is_measured(pool4: Pool) -> None:
    for error, _, lines in run(pool4, {}):
        assert error == ""
        for what in ("matrix products", "memory copies", "all-reduce within a node", "all-reduce between nodes"):
            assert f"{what} " in lines[0]


def test_rates_count_operations_and_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a product, 2 n³; of a copy, those read and those written."""
    monkeypatch.setattr(module, "timed", lambda work, device: work() is None or 0.5)
    assert check_device(torch.device("cpu"), Sizes(matrix=64, products=3, copied=1024, exchanged=0)) == (
        2 * 64**3 * 3 / 0.5,
        2 * 1024 / 0.5,
    )


def test_rounds_let_every_node_meet_two_others() -> None:
    assert rounds(["a"]) == []
    assert rounds(["a", "b"]) == [[("a", "b")]]
    for n in (3, 4, 7, 64):
        nodes = [f"node{i}" for i in range(n)]
        found = rounds(nodes)
        met: dict[str, set[str]] = {node: set() for node in nodes}
        for pairs in found:
            flat = [node for pair in pairs for node in pair]
            assert len(flat) == len(set(flat))
            for a, b in pairs:
                met[a].add(b)
                met[b].add(a)
        assert {len(others) for others in met.values()} == {2}


def test_only_less_than_the_share_is_slow(caplog: pytest.LogCaptureFixture) -> None:
    assert slow({"a": 100, "b": 100, "c": 91, "d": 85}) == {"d": pytest.approx(85 / 95.5)}
    assert list(slow({"a": 100, "b": 100, "c": 100, "d": 91})) == []
    assert slow({"a": 100, "b": 100, "c": 100, "d": 60}) == {"d": pytest.approx(0.6)}
    assert slow({}) == {}
    with caplog.at_level(logging.WARNING, "ssscale"):
        report({"copies": ("GB/s", {"rank 0 on x": 10.0, "rank 1 on x": 10.0, "rank 2 on y": 5.0})}, 1.0)
    assert [record.message for record in caplog.records] == [
        "preflight: rank 2 on y: copies at 0.50 of the median (5 GB/s)"
    ]


@pytest.fixture
def slurm(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    return monkeypatch


def test_auto_is_on_under_slurm_only(slurm: pytest.MonkeyPatch, groups: Groups) -> None:
    assert (wanted(Auto.auto), wanted(True), wanted(False)) == (False, True, False)
    slurm.setenv("SLURM_JOB_ID", "7")
    assert (wanted(Auto.auto), wanted(True), wanted(False)) == (True, True, False)


def test_a_run_begins_with_it(corpus: Path, tmp_path: Path) -> None:
    assert "SLURM_JOB_ID" not in os.environ
    keys = [f"data.path={corpus}", "data.num_workers=0", "train.max_steps=1", "train.save_every=0"]
    for setting, times in (("true", 1), ("auto", 0)):
        with running([*keys, f"train.preflight={setting}"], tmp_path / setting, size=2) as ranks:
            ranks.finish()
        assert ranks.output().count("preflight in ") == times


@pytest.mark.gpu
def test_a_gpu_is_measured() -> None:
    """It has not been run yet."""
    from ssscale.train.preflight import ON_GPU

    products, copies = check_device(torch.device("cuda", 0), ON_GPU)
    assert 1e13 < products < 1e16
    assert 1e11 < copies < 1e13
