"""Exchanges by copy engines against NCCL's. `pytest -m gpu tests/gpu/test_copies.py`: two GPUs, a minute."""

import os
import random
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from ssscale_kernels.adamw import FlatAdamW, Segment, Settings, clip_factor
from torch import Tensor

from ssscale.config import load_config
from ssscale.engine.deepspeed import DeepSpeedEngine
from ssscale.engine.direct import DirectGradients, cut
from ssscale.engine.exchange import Exchange
from ssscale.layout import PackedLayout
from ssscale.model.decoder import Decoder
from ssscale.model.init import initialize_weights
from ssscale.parallel.copies import Peers, add_up, part
from ssscale.parallel.groups import Groups, initialize

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
        fill, apart = shared.random() < 0.7, shared.random() < 0.5
        gathering = peers.gather(x, fill) if kind != "scatter" else None
        landed = None if gathering is None else gathering.arrived().clone()
        _sleep(own, torch.cuda.current_stream())
        first = torch.full_like(x, torch.nan) if apart else None
        scattering = peers.scatter(partial, first) if kind != "gather" else None
        _sleep(own, peers.stream)
        if scattering is not None:
            received = scattering()
            total = torch.empty_like(part(partial, peers.rank, peers.ranks))
            add_up([*received[: peers.rank], part(partial, peers.rank, peers.ranks), *received[peers.rank :]], total)
        if gathering is not None:
            whole = gathering.whole()
            expected = torch.empty_like(whole)
            dist.all_gather_into_tensor(expected, x)
            assert not fill or torch.equal(whole, expected), f"gather {number}"
            for other in peers.others:
                assert torch.equal(part(landed, other, peers.ranks), part(expected, other, peers.ranks)), number
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


# By bucket, the sizes of its weights. Some are cut by the boundary between two partitions, at an odd element.
WEIGHTS = ((3, 5_000_001, 77, 1_000_000), (12_345_677,), (1,), (64, 64), (2_000_000, 2_000_000))
STEPS, NAN = 12, 5  # NAN: the step that is skipped
SETTINGS = Settings(lr=1e-2, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1, step=1)


def _gradient(step: int, rank: int, bucket: int, weight: int) -> Tensor:
    seed = ((step * 8 + rank) * 8 + bucket) * 8 + weight
    generator = torch.Generator(torch.device("cuda", torch.cuda.current_device())).manual_seed(seed)
    x = torch.randn(WEIGHTS[bucket][weight], device="cuda", generator=generator)
    return (x * (torch.nan if (step, rank, weight) == (NAN, 0, 0) else 1.0)).bfloat16()


class _Weights:
    """Weights and AdamW's state of a rank's partitions of the buckets `WEIGHTS`."""

    def __init__(self, peers: Peers) -> None:
        rank, ranks = peers.rank, peers.ranks
        self.partitions = [-(-sum(sizes) // ranks) for sizes in WEIGHTS]
        self.places = [[(sum(sizes[:i]), size) for i, size in enumerate(sizes)] for sizes in WEIGHTS]
        self.flats = [[torch.zeros(n, device="cuda") for _ in range(3)] for n in self.partitions]
        self.wholes = [torch.zeros(ranks * n, device="cuda", dtype=torch.bfloat16) for n in self.partitions]
        self.owns = [part(whole, rank, ranks) for whole in self.wholes]
        self.pieces = [
            (i, j, fragment)
            for i, weights in enumerate(self.places)
            for j, place in enumerate(weights)
            for fragment in cut(*place, self.partitions[i], 0)
            if fragment.rank == rank
        ]
        segments = []
        for i, _, (_, _, place, size) in self.pieces:
            segments.append(Segment(*(x[place : place + size] for x in (*self.flats[i], self.owns[i]))))
        self.adamw = FlatAdamW(segments)
        self.seen: list[Tensor] = []

    def update(self, gradients: list[Tensor], parts: int) -> None:
        """Skips a step with NaN. Does not clip, so that the order in which the norm adds does not matter."""
        total = self.adamw.sum_of_squares(gradients, parts)
        dist.all_reduce(total)
        self.adamw.update(gradients, [SETTINGS], clip_factor(total, 0.0)[1], parts)
        self.seen += [flats[0].clone() for flats in self.flats]


def _pushes(peers: Peers) -> None:
    """Steps by pushed gradients, and the same steps by NCCL's sums in fp32. Nothing waits between the steps."""
    pushed, summed, own = _Weights(peers), _Weights(peers), random.Random(peers.rank)
    direct = DirectGradients(peers, pushed.partitions, pushed.places)
    for step in range(STEPS):
        for i, sizes in reversed(list(enumerate(WEIGHTS))):
            for j in range(len(sizes)):
                _sleep(own, torch.cuda.current_stream())
                direct.keep(i, j, _gradient(step, peers.rank, i, j))
                direct.push(i, j)
                _sleep(own, peers.stream)
        direct.finish()
        _sleep(own, torch.cuda.current_stream())
        pushed.update([x for i, j, _ in pushed.pieces for x in direct.own_parts(i, j)], peers.ranks)
        direct.clear()
        _sleep(own, torch.cuda.current_stream())
        gathers = [peers.start_filling(*pair) for pair in zip(pushed.wholes, pushed.owns, strict=True)]
        for work in gathers if step % 2 else ():  # otherwise, the next step does not wait for them
            work.wait()
        torch.full((10_000_000,), torch.nan, device="cuda", dtype=torch.bfloat16)  # in the memory that is free by now
    for work in gathers:
        work.wait()
    for step in range(STEPS):
        sums = []
        for i, sizes in enumerate(WEIGHTS):
            found = torch.cat([_gradient(step, peers.rank, i, j) for j in range(len(sizes))])
            whole, total = (
                torch.zeros(len(summed.wholes[i]), device="cuda"),
                torch.empty(summed.partitions[i], device="cuda"),
            )
            whole[: len(found)] = found
            dist.reduce_scatter_tensor(total, whole)
            sums.append(total)
        summed.update([sums[i][place : place + size] for i, _, (_, _, place, size) in summed.pieces], 1)
    for number, (x, y) in enumerate(zip(pushed.seen, summed.seen, strict=True)):
        assert torch.equal(x, y), f"step {number // len(WEIGHTS)}, bucket {number % len(WEIGHTS)}"
    for before, after in zip(
        pushed.seen[(NAN - 1) * len(WEIGHTS) :], pushed.seen[NAN * len(WEIGHTS) :][: len(WEIGHTS)]
    ):
        assert torch.equal(before, after), "the step with NaN changed weights"
    for whole, own_weights in zip(pushed.wholes, summed.owns, strict=True):
        expected = torch.empty_like(whole)
        dist.all_gather_into_tensor(expected, own_weights)
        assert torch.equal(whole, expected)
    direct.close()


def _engine(groups: Groups, direct: bool) -> tuple[list[float], list[float], list[Tensor], int]:
    """Trains a small model in steps of one or two microbatches. Returns losses, norms, masters, and how many were pushed."""
    keys = ["config=tiny_ssmax", "train.batch_size=2", "train.microbatch=1", "train.precision=bf16"]
    config = load_config([*keys, "parallel.overlap=true", "parallel.copy_engines=true"])
    with torch.device(groups.device):
        decoder = Decoder(config.model, groups, 256, dtype=torch.bfloat16)
        initialize_weights(decoder, config.model, groups, seed=1)
    layout = PackedLayout.from_lengths([1, 63, 100, 92]).to(groups.device)
    losses, norms, pushed = [], [], 0
    with patch.object(Exchange, "can_be_direct", lambda _: direct):
        engine = DeepSpeedEngine(decoder, config, groups)
        for step, count in enumerate((1, 1, 2, 1, 1)):
            engine.set_batch_size(count * groups.data_size, 1)
            pushed += engine.exchange.pushed is not None
            for microbatch in range(count):
                factor = 3 + step + microbatch + 7 * groups.rank
                tokens = (torch.arange(256, device=groups.device) * factor) % config.model.vocab_size
                labels = (7 * tokens + 3) % config.model.vocab_size
                divisor = 256 * count * groups.data_size
                losses.append(float(engine.forward_backward(tokens, layout, labels, divisor).losses.mean()))
            norms.append(engine.step(1e-3).grad_norm)
    return losses, norms, [f.tensor.clone() for f in engine.fragments() if f.state == "weight"], pushed


def _engines() -> None:
    """Kernels of the backward pass may add in another order from run to run, so results agree up to that."""
    groups = initialize(local_rank=torch.cuda.current_device())
    (losses, norms, masters, pushed), (expected, sums, others, none) = (_engine(groups, way) for way in (True, False))
    assert (pushed, none) == (4, 0)
    assert losses == pytest.approx(expected, rel=2e-3)
    assert norms == pytest.approx(sums, rel=1e-2)
    for master, other in zip(masters, others, strict=True):
        assert (master - other).abs().mean() < 1e-4  # a tenth of a step


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
    _pushes(peers)
    _exchanges(peers, 50)
    _engines()
    torch.cuda.synchronize()
    dist.destroy_process_group()


def test_copies_are_those_of_nccl(tmp_path: object) -> None:
    mp.spawn(_rank, args=(2, f"{tmp_path}/store"), nprocs=2)
