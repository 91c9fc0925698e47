"""Exchanges by copy engines against NCCL's. `pytest -m gpu tests/gpu/test_copies.py`: two GPUs, a minute."""

import os
import random

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from ssscale.parallel.copies import Peers, add_up, part

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]
CYCLES = 2_000_000  # about a millisecond


def _sleep(chance: random.Random, stream: torch.cuda.Stream) -> None:
    """Delays a stream on this rank only."""
    if chance.random() < 0.3:
        with torch.cuda.stream(stream):
            torch.cuda._sleep(int(chance.random() * CYCLES))


def _exchanges(peers: Peers, cases: int) -> None:
    """Gathers, scatters, and a scatter within a gather, of random sizes, with random delays on each rank."""
    shared, own = random.Random(0), random.Random(1 + peers.rank)
    for number in range(cases):
        rows, dim = shared.choice([1, 3, 64, 1000]), shared.choice([8, 200, 2048])
        x = torch.randn(rows, dim, device="cuda", dtype=torch.bfloat16)
        partial = torch.randn(rows * peers.ranks, dim, device="cuda", dtype=torch.bfloat16)
        kind = shared.choice(["gather", "scatter", "both"])
        _sleep(own, torch.cuda.current_stream())
        gathering = peers.gather(x) if kind != "scatter" else None
        _sleep(own, torch.cuda.current_stream())
        scattering = peers.scatter(partial) if kind != "gather" else None
        _sleep(own, peers.stream)
        if scattering is not None:
            received = scattering()
            total = torch.empty_like(part(partial, peers.rank, peers.ranks))
            add_up([*received[: peers.rank], part(partial, peers.rank, peers.ranks), *received[peers.rank :]], total)
        if gathering is not None:
            whole = gathering()
            expected = torch.empty_like(whole)
            dist.all_gather_into_tensor(expected, x)
            assert torch.equal(whole, expected), f"gather {number}"
        if scattering is not None:
            expected = torch.empty_like(total)
            dist.reduce_scatter_tensor(expected, partial)
            assert torch.equal(total, expected), f"scatter {number}"


def _buffers(peers: Peers, dtype: torch.dtype) -> None:
    """Flat buffers, several in flight, smaller and larger than a chunk."""
    sizes = [peers.ranks * n for n in (1, 77, 1_000_000, 20_000_000, 5)]
    buffers = [torch.randn(n, device="cuda").to(dtype) for n in sizes]
    expected = []
    for whole in buffers:
        found = torch.empty(len(whole) // peers.ranks, device="cuda", dtype=dtype)
        dist.reduce_scatter_tensor(found, whole.clone())
        expected.append(found)
    owns = [part(whole, peers.rank, peers.ranks) for whole in buffers]
    for work in [peers.start_reduction(own, whole) for own, whole in zip(owns, buffers, strict=True)]:
        work.wait()
    for own, found in zip(owns, expected, strict=True):
        assert torch.equal(own, found)
    if dtype == torch.bfloat16:
        for whole in (torch.randn(n, device="cuda").to(dtype) for n in sizes):
            found = torch.empty(len(whole) // peers.ranks, device="cuda")
            dist.reduce_scatter_tensor(found, whole.float())
            own = torch.full_like(found, torch.nan)
            peers.start_reduction(own, whole).wait()
            assert torch.equal(own, found)
    wholes = []
    for whole, own in zip(buffers, owns, strict=True):
        wholes.append(torch.empty_like(whole))
        dist.all_gather_into_tensor(wholes[-1], own.clone())
    for work in [peers.start_filling(whole, own) for whole, own in zip(buffers, owns, strict=True)]:
        work.wait()
    for whole, found in zip(buffers, wholes, strict=True):
        assert torch.equal(whole, found)


def _rank(rank: int, ranks: int, store: str) -> None:
    os.environ["LOCAL_RANK"] = str(rank)
    torch.cuda.set_device(rank)
    torch.manual_seed(rank)
    device = torch.device("cuda", rank)
    dist.init_process_group("cpu:gloo,cuda:nccl", init_method=f"file://{store}", rank=rank, world_size=ranks)
    peers = Peers(dist.group.WORLD, device)
    _exchanges(peers, 300)
    for dtype in (torch.float32, torch.bfloat16):
        _buffers(peers, dtype)
    _exchanges(peers, 50)
    torch.cuda.synchronize()
    dist.destroy_process_group()


def test_copies_are_those_of_nccl(tmp_path: object) -> None:
    mp.spawn(_rank, args=(2, f"{tmp_path}/store"), nprocs=2)
