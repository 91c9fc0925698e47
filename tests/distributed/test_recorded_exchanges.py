"""Exchanges by copy engines that CUDA graphs repeat, with threads in place of GPUs. Real graphs: tests/gpu/test_graphs.py."""

import random
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from ssscale.parallel import turns
from ssscale.parallel.copies import part
from ssscale.parallel.turns import RecordedTurns
from tests.distributed.threads import Lagging, Memory, on_threads

ROWS, DIM, GRAPHS, ROUNDS = 3, 8, 3, 60
KEPT: list[Any] = []  # whose memory commands use that are still to run, also after a failure


class Recorder:
    """A driver that remembers its commands and does nothing. `replay` gives them to the real one."""

    def __init__(self, driver: Any) -> None:
        self.driver = driver
        self.commands: list[tuple[Callable[..., None], tuple[Any, ...]]] = []

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *arguments: self.commands.append((getattr(self.driver, name), arguments))

    def replay(self) -> None:
        for command, arguments in self.commands:
            command(*arguments)


class Graph:
    """A gather of x, a scatter of y, whose first part gets a tensor of its own.

    landed, own: the compute stream reads what came by them, before another exchange may begin.
    """

    def __init__(self, peers: Lagging, size: int) -> None:
        self.recorder = Recorder(peers.driver)
        self.x, self.y = torch.zeros(size, DIM), torch.zeros(size * peers.ranks, DIM)
        with patch.object(peers, "driver", self.recorder):
            gathering = peers.gather(self.x)
            arrived, self.landed = gathering.arrived(), torch.zeros(size * peers.ranks, DIM)
            self.recorder.launch(0, self.landed.copy_, arrived)
            received = peers.scatter(self.y, torch.zeros_like(self.x))()
            self.own = [torch.zeros_like(x) for x in received]
            self.recorder.launch(0, lambda: [own.copy_(x) for own, x in zip(self.own, received, strict=True)])
            self.whole = gathering.whole()
        KEPT.append(self)


def values(number: int, rank: int, rows: int) -> Tensor:
    return torch.randn(rows, DIM, generator=torch.Generator().manual_seed(1000 * rank + number))


def rounds(peers: Lagging) -> None:
    """Replays graphs in a random order, the same on all ranks, with other exchanges between them. Nothing waits."""
    shared, rank, ranks = random.Random(7), peers.rank, peers.ranks
    KEPT.extend((peers, largest := torch.zeros(ROWS + GRAPHS, DIM), peers.gather(largest).whole()))
    with peers.recording() as recorded:
        KEPT.append(recorded)
        graphs = [Graph(peers, ROWS + number) for number in range(GRAPHS)]
    found: list[tuple[Tensor, Tensor, str]] = []
    launch = peers.driver.launch

    def note(seen: Tensor, expected: Tensor, said: str) -> None:
        found.append((seen.clone(), expected, said))

    for number in range(ROUNDS):
        graph = shared.choice(graphs)
        rows = len(graph.x)
        launch(0, graph.x.copy_, values(number, rank, rows))
        launch(0, graph.y.copy_, values(number + ROUNDS, rank, rows * ranks))
        graph.recorder.replay()
        expected = torch.cat([values(number, other, rows) for other in range(ranks)])
        launch(0, note, graph.whole, expected, f"gather {number}")
        for other in peers.others:
            launch(0, note, part(graph.landed, other, ranks), part(expected, other, ranks), f"gather {number}, arrived")
        senders = [other for other in range(ranks) if other != rank]
        for own, other in zip(graph.own, senders, strict=True):
            sent = part(values(number + ROUNDS, other, rows * ranks), rank, ranks)
            launch(0, note, own, sent, f"scatter {number}")
        for _ in range(shared.choice([0, 0, 1, 2])):
            x = values(number + 2 * ROUNDS, rank, rows)
            whole = peers.gather(x).whole()
            expected = torch.cat([values(number + 2 * ROUNDS, other, rows) for other in range(ranks)])
            launch(0, note, whole, expected, f"gather outside of graphs, {number}")
            KEPT.extend((x, whole))
    peers.meet()
    for seen, wanted, said in found:
        assert torch.equal(seen, wanted), said


@pytest.mark.parametrize("ranks", [2, 3])
def test_graphs_may_be_replayed_in_any_order(ranks: int) -> None:
    on_threads(ranks, rounds, Lagging)


def _never_lowered(turns: RecordedTurns, rank: int) -> None:
    turns.peers.driver.wait_for_flag(turns.peers.side, turns.here[rank] + turns._place, 1, 0)


@pytest.mark.parametrize(
    "planted", [patch.object(RecordedTurns, "await_flag", _never_lowered), patch.object(turns, "SLOTS", 1)]
)
def test_a_flag_that_stays_up_and_a_slot_for_all_are_noticed(planted: Any) -> None:
    with planted, patch.object(Memory, "patience", 5.0), pytest.raises(AssertionError, match=r"gather|scatter"):
        on_threads(3, rounds, Lagging)


def test_an_exchange_larger_than_all_before_is_not_recorded() -> None:
    def work(peers: Lagging) -> None:
        with peers.recording():
            peers.gather(torch.zeros(ROWS, DIM))

    with pytest.raises(AssertionError, match="in a slot of 0"):
        on_threads(2, work, Lagging)
