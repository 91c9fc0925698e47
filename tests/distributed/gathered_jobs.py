"""Jobs for the worker pool: ZeRO-3 with blocks that are gathered whole, compiled or not."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from ssscale.config import load_config
from ssscale.config.choices import Compile, Recompute
from ssscale.config.schema import Config, DataConfig, ParallelConfig, TrainConfig, optimizer_config
from ssscale.engine import deepspeed
from ssscale.engine.deepspeed import DeepSpeedEngine
from ssscale.layout import PackedLayout
from ssscale.model.decoder import Decoder
from ssscale.model.init import initialize_weights
from ssscale.train.loop import train as train_run
from ssscale.train.pretrain import pretraining
from tests.distributed.compiled_models import TOKENS, make_model
from tests.distributed.jobs import regroup

LAYERS = 3


@contextmanager
def gathered(largest_kept: int = 0) -> Iterator[None]:
    """By default, DeepSpeed keeps weights of at most 100,000 elements whole, and those that are used again soon."""
    original = deepspeed.deepspeed_config

    def tight(*arguments: Any) -> dict[str, Any]:
        found = original(*arguments)
        found["zero_optimization"] |= {
            "stage3_param_persistence_threshold": largest_kept,
            "stage3_max_reuse_distance": 0,
            "stage3_prefetch_bucket_size": 30_000,  # a block of the models here has 49,000 elements
            "reduce_bucket_size": 20_000,  # less than the largest weight
        }
        return found

    with patch.object(deepspeed, "deepspeed_config", tight):
        yield


class Storages:
    """The memory of the weights that blocks run with."""

    def __init__(self, model: Decoder) -> None:
        self.found: list[tuple[int, StorageWeakRef]] = []  # with the number of the block
        self.whole = True
        self.left: list[int] = []  # blocks whose weights are still there when the loss is computed
        for number, block in enumerate(model.blocks):
            block.forward = self._noting(number, block, block.forward)
        from_logits = model.from_logits

        def noting(*arguments: Any) -> Any:
            self.left = self.alive()
            return from_logits(*arguments)

        model.from_logits = noting

    def _noting(self, number: int, block: nn.Module, forward: Any) -> Any:
        def noting(*arguments: Any) -> Any:
            self.whole &= all(weight.shape == weight.ds_shape for weight in block.parameters())
            self.found += [(number, StorageWeakRef(weight.untyped_storage())) for weight in block.parameters()]
            return forward(*arguments)

        return noting

    def alive(self) -> list[int]:
        return sorted({number for number, storage in self.found if not storage.expired()})


def gradients(engine: DeepSpeedEngine) -> dict[str, Tensor]:
    """Of each weight, over all ranks: AdamW's first moments after one step are 0.1 times the gradients."""
    found: dict[str, Tensor] = {}
    for name in engine.names:
        flat = torch.zeros(engine.local_shape(name).numel())
        for fragment in engine.fragments():
            if (fragment.name, fragment.state) == (name, "exp_avg"):
                flat[fragment.start : fragment.start + fragment.tensor.numel()] = fragment.tensor
        torch.distributed.all_reduce(flat)
        found[name] = flat
    return found


def train(
    core: str,
    recompute: str = "none",
    zero: int = 3,
    gather: bool = True,
    backend: str | None = None,
    tensor: int = 1,
    evaluate: bool = False,
) -> dict[str, Any]:
    """Two steps of two microbatches each. gather: blocks are leaves of DeepSpeed. backend: which compiles them; None: nothing.

    evaluate: whether a pass without gradients runs between the steps.
    """
    groups = regroup(tensor)
    model = replace(make_model(core, LAYERS), tie_embeddings=core == "softmax")
    compiled = Compile.block if gather else Compile.none
    rows = 2 * groups.data_size
    config = Config(
        model=model,
        data=DataConfig(length=TOKENS),
        optimizer=replace(optimizer_config(), clip=0.0),
        train=TrainConfig(batch_size=rows, microbatch=1, compile=compiled),
        parallel=ParallelConfig(tensor=tensor, zero_stage=zero),
    )
    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters
    counters.clear()
    options = {"sequence_parallel": True, "compile_exchanges": True}  # of no effect if tensor is 1
    decoder = Decoder(model, groups, TOKENS, recompute=Recompute(recompute), **options)
    initialize_weights(decoder, model, groups, seed=3)
    if backend is not None:
        decoder.compile_parts(backend, within_hooks=config.gathers_blocks(groups.on_gpu))
    storages = Storages(decoder)
    with gathered():
        engine = DeepSpeedEngine(decoder, config, groups)
    losses, first = [], {}
    layout = PackedLayout.from_lengths([100, TOKENS - 100])
    for step in range(2):
        for microbatch in range(2):
            generator = torch.Generator().manual_seed(100 * step + 10 * microbatch + groups.data_rank)
            tokens = torch.randint(0, model.vocab_size, (TOKENS,), generator=generator)
            divisor = rows * TOKENS
            losses.append(engine.forward_backward(tokens, layout, tokens.roll(-1), divisor).losses.clone())
        if evaluate:
            with torch.no_grad():
                losses.append(engine.module(tokens, layout, tokens.roll(-1)).clone())
        norm = engine.step(0.01).grad_norm
        first = first or gradients(engine)
    return {
        "losses": torch.stack(losses),
        "norm": norm,
        "gradients": first,
        "whole": storages.whole,
        "left": storages.left,
        "after": storages.alive(),
        "graphs": counters["stats"]["unique_graphs"],
        "breaks": sum(counters["graph_break"].values()),
    }


def pretrain(data: str, run: str, backend: str | None = None, **changes: object) -> list[str]:
    """A run of `tiny_ssmax` under ZeRO-3. backend: which compiles. Returns the modes in which blocks were compiled.

    Observation reads SSMax's s, one number per head, which DeepSpeed keeps whole.
    """
    arguments = [f"{key}={json.dumps(value)}" for key, value in changes.items()]
    fixed = ["config=tiny_ssmax", f"data.path={data}", f"run_dir={run}", "data.num_workers=0", "parallel.zero_stage=3"]
    compile_parts = Decoder.compile_parts
    modes = []

    def compile_with(decoder: Decoder, **how: bool) -> None:
        modes.append("within hooks" if how["within_hooks"] else "with hooks")
        if backend is not None:
            compile_parts(decoder, backend, **how)

    torch._dynamo.reset()
    with gathered(largest_kept=8), patch.object(Decoder, "compile_parts", compile_with):
        train_run(pretraining(load_config([*fixed, *arguments]), regroup(1)))
    return modes
