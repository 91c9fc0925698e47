"""Addresses, slots and flags of the exchanges by copy engines, with threads in place of GPUs.

The commands of a stream run at once here, in the thread of their rank. tests/gpu/test_copies.py has the real ones.
"""

from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from ssscale.config.choices import Auto
from ssscale.parallel import copies, turns
from ssscale.parallel.copies import add_up, part
from ssscale.train.estimate import COPY_SLOTS
from tests.distributed.threads import Memory, Thread, on_threads
from tests.pool import Pool

CASES = 40


def tensors(ranks: int, case: int, dtype: torch.dtype) -> list[Tensor]:
    """Returns those of all ranks, [rows, dim]. Later ones may be larger or smaller."""
    generator = torch.Generator().manual_seed(case)
    rows, dim = 1 + case * 7 % 11, (8, 24, 3)[case % 3]
    return [torch.randn(rows * ranks, dim, generator=generator).to(dtype) for _ in range(ranks)]


def sum_of(parts: list[Tensor]) -> Tensor:
    total = parts[0].float()
    for x in parts[1:]:
        total = total + x.float()
    return total.to(parts[0].dtype)


def check_exchanges(peers: Thread, dtype: torch.dtype) -> None:
    rank, ranks = peers.rank, peers.ranks
    for case in range(CASES):
        every = tensors(ranks, case, dtype)
        mine = every[rank].clone()
        gathering = peers.gather(part(mine, rank, ranks), fill=case % 4 < 3) if case % 3 else None
        if gathering is not None:
            arrived = gathering.arrived()
            for i in peers.others:
                assert torch.equal(part(arrived, i, ranks), part(every[i], i, ranks)), f"gather {case}"
        first = torch.full_like(part(mine, rank, ranks), torch.nan) if case % 5 else None
        received = peers.scatter(mine, first)() if case % 2 else None
        if received is not None:
            assert first is None or received[0] is first
            received.insert(rank, part(mine, rank, ranks))
            total = torch.empty_like(received[0])
            add_up(received, total)
            assert torch.equal(total, sum_of([part(x, rank, ranks) for x in every])), f"scatter {case}"
        if gathering is not None and case % 4 < 3:
            expected = torch.cat([part(x, i, ranks) for i, x in enumerate(every)])
            assert torch.equal(gathering.whole(), expected), f"gather {case}"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_gathers_and_scatters(ranks: int, dtype: torch.dtype) -> None:
    on_threads(ranks, lambda peers: check_exchanges(peers, dtype))


@pytest.mark.parametrize("ranks", [2, 4])
def test_bf16_is_summed_in_fp32(ranks: int) -> None:
    every = [torch.randn(50 * ranks, generator=torch.Generator().manual_seed(i)).bfloat16() for i in range(ranks)]
    sums = sum_of([x.float() for x in every])

    def work(peers: Thread) -> None:
        own = torch.full((50,), torch.nan)
        peers.start_reduction(own, every[peers.rank])
        assert torch.equal(own, part(sums, peers.rank, ranks))

    with patch.object(copies, "CHUNK", 64):
        on_threads(ranks, work)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("size", [1, 5, 16, 33])
def test_buffers_are_reduced_and_filled_in_chunks(ranks: int, size: int, dtype: torch.dtype) -> None:
    every = [torch.randn(size * ranks, generator=torch.Generator().manual_seed(i)).to(dtype) for i in range(ranks)]
    sums = sum_of(every)

    def work(peers: Thread) -> Tensor:
        whole = every[peers.rank].clone()
        own = part(whole, peers.rank, ranks)
        peers.start_reduction(own, whole)
        assert torch.equal(own, part(sums, peers.rank, ranks))
        peers.start_filling(whole, own)
        return whole

    with patch.object(copies, "CHUNK", 64):
        for whole in on_threads(ranks, work):
            assert torch.equal(whole, sums)


def test_a_slot_that_is_used_again_too_early_is_noticed() -> None:
    """A rank that fails leaves the others waiting."""
    planted = patch.object(turns, "SLOTS", 1), patch.object(Memory, "patience", 2.0)
    with planted[0], planted[1], pytest.raises(AssertionError, match=r"gather|scatter|never set"):
        on_threads(3, lambda peers: check_exchanges(peers, torch.float32))


def test_all_ranks_learn_which_one_cannot_share_memory(pool2: Pool) -> None:
    said = "parallel.copy_engines=true: GPU 1 of 2 cannot share memory with the others (peer access is not supported)"
    assert (
        pool2.run("tests.distributed.obstacle_jobs:share", broken=1) == [said + ": use parallel.copy_engines=false"] * 2
    )


@pytest.mark.parametrize("broken", [None, 0, 1])
def test_gathers_are_overlapped_where_tokens_cannot_be_copied(pool2: Pool, broken: int | None) -> None:
    def chosen(given: bool | Auto) -> Any:
        first, second = pool2.run("tests.distributed.obstacle_jobs:choose", given=given, broken=broken)
        assert first == second
        return first

    assert chosen(Auto.auto) == ((True, False) if broken is None else (False, True))
    assert chosen(False) == (False, False)
    refusal = "parallel.copy_engines=true: this one is broken: use parallel.copy_engines=false"
    assert chosen(True) == ((True, False) if broken is None else refusal)


def test_the_estimate_counts_the_slots() -> None:
    """However few bytes the exchange of gradients and weights has."""

    def exchange(peers: Thread) -> int:
        whole = torch.zeros(4 * peers.ranks)
        peers.start_reduction(part(whole, peers.rank, peers.ranks), whole)
        peers.start_filling(whole, part(whole, peers.rank, peers.ranks))
        return peers.turns.slots[peers.rank].nbytes

    assert on_threads(3, exchange) == [3 * COPY_SLOTS] * 3
