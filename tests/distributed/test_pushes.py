"""Gradients that copy engines push to their owners: places, flags and lifetimes, with threads in place of GPUs.

tests/gpu/test_copies.py has GPUs, and tests/distributed/test_overlap.py whole training steps with gloo.
"""

import random
from unittest.mock import patch

import pytest
import torch

from ssscale.config import load_config
from ssscale.engine.direct import DirectGradients, cut
from ssscale.model.flops import count_parameters
from ssscale.parallel.copies import part
from ssscale.train.estimate import COPY_SLOTS, memory_per_gpu
from tests.distributed.push_jobs import WEIGHTS, found_in, gradients_of, layout, owned
from tests.distributed.threads import Memory, Thread, on_threads
from tests.pool import Pool

STEPS = 12


def exchange(peers: Thread, gather: bool = True) -> None:
    """Steps with gradients in another order on each rank. gather: whether weights are gathered after each."""
    direct, chance = DirectGradients(peers, *layout(peers.ranks)), random.Random(peers.rank)
    weights = torch.zeros(4 * peers.ranks)
    for step in range(STEPS):
        order = [(i, j) for i, sizes in enumerate(WEIGHTS) for j in range(len(sizes))]
        chance.shuffle(order)
        mine = gradients_of(step, peers.rank)
        for i, j in order:
            direct.keep(i, j, mine[i][j])
            direct.push(i, j)
        direct.finish()
        for bucket in range(len(WEIGHTS)):
            every = [owned(gradients_of(step, rank)[bucket], peers.rank, peers.ranks) for rank in range(peers.ranks)]
            assert len(found_in(direct, bucket)) in (0, peers.ranks)
            for rank, values in enumerate(found_in(direct, bucket)):
                assert torch.equal(values, every[rank]), f"step {step}, bucket {bucket}, from rank {rank}"
        direct.clear()
        assert not direct.gradients
        if gather:
            peers.start_filling(weights, part(weights, peers.rank, peers.ranks))
    direct.close()


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_each_rank_gets_its_pieces_of_all_gradients(ranks: int) -> None:
    on_threads(ranks, exchange)


def test_gathers_keep_the_memory_until_it_has_been_read() -> None:
    """Without them, a rank overwrites what another one still reads."""
    with patch.object(Memory, "patience", 2.0), pytest.raises(AssertionError, match=r"from rank|never set"):
        on_threads(3, lambda peers: exchange(peers, gather=False))


def test_ranks_wait_for_the_flags_of_all_others() -> None:
    def no_wait(self: Memory, stream: int, flag: int, value: int, _: int) -> None: ...

    with patch.object(Memory, "wait_for_flag", no_wait), pytest.raises(AssertionError, match="from rank"):
        on_threads(3, exchange)


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
