"""Gradients that copy engines push to their owners: places, flags and lifetimes, with threads in place of GPUs.

tests/gpu/test_copies.py has GPUs, and tests/distributed/test_overlap.py whole training steps with gloo.
"""

import random
from contextlib import nullcontext
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch

from ssscale.config import load_config
from ssscale.engine.direct import DirectGradients, cut
from ssscale.model.flops import count_parameters
from ssscale.parallel.copies import Peers, part
from ssscale.train.estimate import COPY_SLOTS, memory_per_gpu
from tests.distributed.push_jobs import check_parts, gradients_of, layout, parts_of
from tests.distributed.threads import Lagging, Memory, Streams, Thread, on_threads
from tests.pool import Pool

STEPS = 12


def exchange(peers: Lagging, gather: bool = True) -> None:
    """Steps with gradients in another order on each rank, which waits for nothing. gather: whether each step ends with one."""
    direct, chance = DirectGradients(peers, *layout(peers.ranks)), random.Random(peers.rank)
    weights, compute = torch.zeros(4 * peers.ranks), partial(peers.driver.launch, 0)
    for step in range(STEPS):
        values = gradients_of(step, peers.rank)
        made = {(i, j): torch.full_like(x, torch.nan) for i, bucket in enumerate(values) for j, x in enumerate(bucket)}
        order = list(made)
        chance.shuffle(order)
        for i, j in order:
            compute(made[i, j].copy_, values[i][j])
            direct.keep(i, j, made[i, j])
            direct.push(i, j)
        direct.finish()
        compute(check_parts, parts_of(direct), step, peers.rank, peers.ranks)
        direct.clear()
        for gradient in made.values():
            compute(gradient.fill_, torch.nan)  # its memory is used again
        if gather:
            peers.start_filling(weights, part(weights, peers.rank, peers.ranks))
    direct.close()


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_each_rank_gets_its_pieces_of_all_gradients(ranks: int) -> None:
    on_threads(ranks, exchange, Lagging)


def nothing(*_: Any) -> None: ...


@pytest.mark.parametrize("left_out", ["gather", "wait_for_flag", "wait_for", "begin"])
def test_a_wait_that_is_left_out_is_noticed(left_out: str) -> None:
    """A rank would read too early, or overwrite what another one, or its own copy engine, still reads."""
    planted = {
        "wait_for_flag": patch.object(Memory, "wait_for_flag", nothing),
        "wait_for": patch.object(Streams, "_await", nothing),
        "begin": patch.object(Peers, "begin", lambda _: 0),
        "gather": nullcontext(),
    }[left_out]
    slow = patch.object(Memory, "patience", 2.0)
    with slow, planted, pytest.raises(AssertionError, match=r"from rank|never"):
        on_threads(3, partial(exchange, gather=left_out != "gather"), Lagging)


@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 8])
def test_fragments_cover_each_element_once(ranks: int) -> None:
    partitions, places = layout(ranks)
    for partition, weights in zip(partitions, places, strict=True):
        seen = torch.zeros(ranks, partition, dtype=torch.int64)
        for first, size in weights:
            fragments = list(cut(first, size, partition, base=1000))
            assert [f.start for f in fragments] == [
                0,
                *torch.tensor([f.size for f in fragments]).cumsum(0)[:-1].tolist(),
            ]
            for rank, start, place, length in fragments:
                assert rank * partition + place - 1000 == first + start
                seen[rank, place - 1000 : place - 1000 + length] += 1
        total = sum(size for _, size in weights)
        assert torch.equal(seen.flatten(), (torch.arange(ranks * partition) < total).long())


def test_what_a_rank_owns_whole_is_not_sent() -> None:
    def work(peers: Thread) -> list[int]:
        direct = DirectGradients(peers, [8], [[(0, 8), (8, 8)]])
        return [len(direct.plans[0, weight]) for weight in range(2)]

    assert on_threads(2, work) == [[0, 1], [1, 0]]


def test_processes_exchange_the_same(pool2: Pool, pool4: Pool) -> None:
    """And notice a gradient that is let go too early."""
    for pool in (pool2, pool4):
        for let_go in (False, True):
            answers = pool.run("tests.distributed.push_jobs:push", let_go=let_go)
            assert answers == ["let go" if let_go else "good"] * len(answers)


def test_the_estimate_counts_what_is_received() -> None:
    """2 · (R − 1) / R bytes per parameter, besides the gradients and the slots."""
    keys = ["config=3b_sb", "parallel.overlap=true", "parallel.copy_engines=true", "train.microbatch=1"]
    for ranks in (2, 8):
        config = load_config([*keys, f"train.batch_size={ranks}", "train.precision=bf16"])
        parameters = count_parameters(config.model, config.data.length)

        def received(peers: Thread) -> int:
            direct = DirectGradients(peers, [6400], [[(0, 6400 * peers.ranks)]])
            return sum(x.nbytes for x in direct.pushes.received)

        (measured, *_) = on_threads(ranks, received)
        expected = 2 * parameters + measured / (6400 * ranks) * parameters + ranks * COPY_SLOTS
        assert memory_per_gpu(config, ranks).gradients == pytest.approx(expected, rel=1e-12)
