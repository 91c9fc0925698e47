"""Blocks launched as CUDA graphs against the same blocks launched kernel by kernel.

`pytest -m gpu tests/gpu/test_graphs.py`: a minute or two, most of it compiling. Tensor parallelism needs two GPUs.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from ssscale.config import load_config
from ssscale.engine.deepspeed import DeepSpeedEngine
from ssscale.layout import PackedLayout
from ssscale.model import graphs
from ssscale.model.decoder import Decoder
from ssscale.model.init import initialize_weights
from ssscale.parallel.groups import Groups, initialize
from tests.distributed.compiled_models import make_model

pytestmark = pytest.mark.gpu
ROWS = ([2048], [700, 1348], [1, 700, 323, 1024])  # their boundaries are padded to one number
TOKENS, LONGEST = 2048, 2048


def layout(lengths: list[int], device: torch.device, boundaries: int = 8) -> PackedLayout:
    found = PackedLayout.from_lengths(lengths, LONGEST)
    padding = found.cu_seqlens.new_full((boundaries - len(found.cu_seqlens),), TOKENS)
    return replace(found, cu_seqlens=torch.cat([found.cu_seqlens, padding]), uniform_length=None).to(device)


def make(core: str, groups: Groups) -> tuple[Decoder, graphs.BlockGraphs]:
    config = replace(make_model(core, 3), hidden_size=256, ffn_hidden_size=768, vocab_size=512)
    torch._dynamo.reset()
    several = groups.tensor_size > 1
    options = {"sequence_parallel": True, "compile_exchanges": True, "keep_gathered": True, "copy_engines": True}
    with torch.device(groups.device):
        decoder = Decoder(
            config, groups, LONGEST, dtype=torch.bfloat16, norms_together=several, **options if several else {}
        )
        initialize_weights(decoder, config, groups, seed=1)
    decoder.compile_parts()
    return decoder, graphs.BlockGraphs(decoder, several)


def passed(decoder: Decoder, tokens: torch.Tensor, where: PackedLayout) -> list[torch.Tensor]:
    """Returns losses and gradients of a microbatch, on this rank."""
    decoder.zero_grad()
    losses = decoder(tokens, where, (7 * tokens + 3) % decoder.config.vocab_size)
    losses.mean().backward()
    return [losses.detach().clone(), *(p.grad.clone() for p in decoder.parameters() if p.grad is not None)]


@contextmanager
def launched_kernel_by_kernel(blocks: graphs.BlockGraphs) -> Iterator[None]:
    calls = [block._compiled_call_impl for block in blocks.blocks]
    for block, compiled in zip(blocks.blocks, blocks.compiled, strict=True):
        block._compiled_call_impl = compiled
    yield
    for block, call in zip(blocks.blocks, calls, strict=True):
        block._compiled_call_impl = call


def agree(core: str, groups: Groups) -> None:
    """Bits where two passes without graphs agree in bits, else as closely as these do. The eighth has more boundaries."""
    decoder, blocks = make(core, groups)
    exact = 0
    for number in range(16):
        tokens = (torch.arange(TOKENS, device=groups.device) * (3 + number)) % decoder.config.vocab_size
        where = layout(ROWS[number % 3], groups.device, 16 if number == 7 else 8)
        recorded = passed(decoder, tokens, where)
        with launched_kernel_by_kernel(blocks):
            first, again = (passed(decoder, tokens, where) for _ in range(2))
        assert len(recorded) == len(first)
        for a, b, c in zip(first, again, recorded, strict=True):
            usual, error = ((a.float() - x.float()).abs().max() for x in (b, c))
            assert error <= 3 * usual, (core, number, error, usual)
            exact += int(usual == 0)
        with torch.no_grad():  # an evaluation and an update between two steps
            decoder(tokens, where, tokens)
            for weight in decoder.parameters():
                weight.add_(1e-3)
    assert len(blocks.recorded) == decoder.config.num_layers
    assert blocks.times == 2
    assert exact > 16 * 10
    assert blocks.unseen > 0


@pytest.mark.parametrize("core", ["stickbreaking", "stickbreaking_norm", "ssmax", "softmax"])
def test_graphs_change_no_bit(core: str, groups: Groups) -> None:
    agree(core, groups)


def train(groups: Groups, recorded: bool) -> list[torch.Tensor]:
    """Returns losses, norms and master weights of steps of two microbatches and of one, whose gradients are kept in bf16."""
    config = load_config(["config=tiny_sb", "train.batch_size=2", "train.microbatch=1", "train.precision=bf16"])
    with torch.device(groups.device):
        decoder = Decoder(config.model, groups, 256, dtype=torch.bfloat16)
        initialize_weights(decoder, config.model, groups, seed=1)
    decoder.compile_parts()
    blocks = graphs.BlockGraphs(decoder, False) if recorded else None
    engine = DeepSpeedEngine(decoder, config, groups)
    found = []
    for step, count in enumerate((2, 2, 2, 1, 1, 2, 1)):
        engine.set_batch_size(count, 1)
        for microbatch in range(count):
            tokens = (torch.arange(256, device=groups.device) * (3 + step + microbatch)) % config.model.vocab_size
            where = PackedLayout.from_lengths([[63, 1, 100, 92], [1, 2, 3, 250]][step % 2], 256)
            where = replace(where, uniform_length=None).to(groups.device)
            labels = (7 * tokens + 3) % config.model.vocab_size
            found.append(engine.forward_backward(tokens, where, labels, 256 * count).losses)
        found.append(torch.tensor(engine.step(1e-3).grad_norm))
    assert blocks is None or len(blocks.recorded) == config.model.num_layers
    return found + [fragment.tensor.clone() for fragment in engine.fragments() if fragment.state == "weight"]


def test_training_from_graphs_changes_no_bit(groups: Groups) -> None:
    for first, again, recorded in zip(*(train(groups, way) for way in (False, False, True)), strict=True):
        assert (first - recorded).abs().max() <= 3 * (first - again).abs().max()


def _rank(rank: int, ranks: int, store: str) -> None:
    os.environ["LOCAL_RANK"] = str(rank)
    torch.cuda.set_device(rank)
    dist.init_process_group("cpu:gloo,cuda:nccl", init_method=f"file://{store}", rank=rank, world_size=ranks)
    groups = initialize(tensor=ranks, local_rank=rank)
    for core in ("stickbreaking", "ssmax"):
        agree(core, groups)
    torch.cuda.synchronize()
    dist.destroy_process_group()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_graphs_with_exchanges_change_no_bit(tmp_path: object) -> None:
    mp.spawn(_rank, args=(2, f"{tmp_path}/store"), nprocs=2)
