"""A job for the worker pool: a few training steps with `parallel.overlap`, whose exchanges run in one of several ways."""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from ssscale_kernels.adamw import torch_path
from torch import Tensor

from ssscale.config.choices import ShardWithin
from ssscale.engine import exchange
from ssscale.engine.deepspeed import DeepSpeedEngine
from ssscale.model.decoder import Decoder
from ssscale.parallel.groups import Groups
from ssscale.train.checkpoint import TrainState
from ssscale.train.hooks.guard import check_copies
from ssscale.train.save import save_checkpoint
from tests.distributed import matrix_jobs
from tests.distributed.matrix import Layout
from tests.distributed.matrix_jobs import ROWS, make_batch, make_engine, train_step

BUCKET = 4096  # elements: the small models then have many buckets
EVENTS: list[tuple[Any, ...]] = []  # what happened in the last job, in order


class Late:
    """A collective that runs only when it is waited for.

    Until then its result is NaN, so that whoever does not wait is found out. It sends its input as it was at the start.
    """

    def __init__(self, run: Callable[[], Any], result: Tensor) -> None:
        self.run, self.result = run, result
        result.fill_(torch.nan)

    @torch.no_grad()
    def wait(self) -> None:
        self.run().wait()


def late_reduce_scatter(own: Tensor, whole: Tensor, group: Any) -> Late:
    kept = whole.clone()
    return Late(partial(exchange_reduce_scatter, own, kept, group), own)


def late_all_gather(whole: Tensor, own: Tensor, group: Any) -> Late:
    kept = own.clone()
    return Late(partial(exchange_all_gather, whole, kept, group), whole)


def late_all_reduce(own: Tensor, group: Any) -> Late:
    kept = own.clone()

    def run() -> Any:
        own.copy_(kept)
        return exchange_all_reduce(own, group)

    return Late(run, own)


exchange_reduce_scatter, exchange_all_gather = exchange.reduce_scatter, exchange.all_gather
exchange_all_reduce = exchange.all_reduce


def noted(name: str, collective: Callable[..., Any]) -> Callable[..., Any]:
    def noting(*arguments: Any) -> Any:
        *tensors, _ = arguments
        whole = max(tensors, key=len)
        EVENTS.append((name, len(whole), whole.element_size()))
        return collective(*arguments)

    return noting


def noting_updates() -> AbstractContextManager[Any]:
    update = torch_path.fused_adamw

    def noting(*arguments: Any) -> None:
        EVENTS.append(("update",))
        update(*arguments)

    return patch.object(torch_path, "fused_adamw", noting)


@contextmanager
def exchanging(way: str, direct: bool = True, note_updates: bool = False) -> Iterator[None]:
    """way: `hidden`, as in runs; `late` (see `Late`); `open`, where each collective is waited for at once.

    direct: whether gradients may stay in bf16. note_updates: whether updates of AdamW's segments are among the events.
    """
    reduce_scatter, all_reduce, all_gather = exchange_reduce_scatter, exchange_all_reduce, exchange_all_gather
    if way == "late":
        reduce_scatter, all_reduce, all_gather = late_reduce_scatter, late_all_reduce, late_all_gather
    with ExitStack() as stack:
        for name, value in {
            "reduce_scatter": noted("reduce-scatter", reduce_scatter),
            "all_reduce": noted("all-reduce", all_reduce),
            "all_gather": noted("all-gather", all_gather),
        }.items():
            stack.enter_context(patch.object(exchange, name, value))
        stack.enter_context(patch.object(exchange.Exchange, "hidden", way != "open"))
        if note_updates:
            stack.enter_context(noting_updates())
        if not direct:
            stack.enter_context(patch.object(exchange.Exchange, "can_be_direct", lambda self: False))
        stack.enter_context(patch("ssscale.engine.deepspeed.overlap_bucket", lambda replicas: BUCKET))
        yield


def digests(engine: DeepSpeedEngine) -> dict[str, str]:
    """A hash of each piece of the training state on this rank, and of the weights of its forward pass."""
    found = {f"{part.state} {part.name} {part.start}": part.tensor for part in engine.fragments()}
    found |= {name: weight.detach() for name, weight, _ in engine.copies()}
    return {
        key: hashlib.sha256(value.contiguous().flatten().view(torch.uint8).numpy().tobytes()).hexdigest()
        for key, value in found.items()
    }


@contextmanager
def without_gradient(engine: DeepSpeedEngine, ranks: Sequence[int], groups: Groups) -> Iterator[None]:
    """The last block's first norm has no gradient on these ranks."""
    norm = engine.engine.module.blocks[-1].attention_norm
    weight = norm.weight
    if groups.rank in ranks:
        weight.requires_grad_(False)
    yield
    weight.requires_grad_(True)


def number_cut(engine: DeepSpeedEngine) -> int | None:
    """How many weights lie in this rank's partitions in part, if gradients are pushed."""
    pushed = engine.exchange.pushed if engine.exchange is not None else None
    if pushed is None:
        return None
    groups = engine.engine.optimizer.bf16_groups
    return sum(size < groups[i][j].numel() for (i, j), (_, size) in pushed.own.items())


@torch.no_grad()
def look(engine: DeepSpeedEngine) -> None:
    """A forward pass without gradients."""
    batch = make_batch(100, range(ROWS))
    engine.module(batch.tokens, batch.layout, batch.labels)


def compile_first(decoder: Decoder, *arguments: Any) -> DeepSpeedEngine:
    torch._dynamo.reset()
    decoder.compile_parts("eager")
    return DeepSpeedEngine(decoder, *arguments)


def note_end_of_backward(engine: DeepSpeedEngine) -> None:
    reduce = engine.engine.allreduce_gradients

    def end_of_backward() -> None:
        EVENTS.append(("end of backward",))
        reduce()

    engine.engine.allreduce_gradients = end_of_backward


def train(
    layout: Layout,
    way: str,
    overlap: bool = True,
    bf16: bool = False,
    sums_bf16: bool = False,
    steps: int = 4,
    first: int = 0,
    accumulations: Sequence[int] = (),
    unused: dict[int, Sequence[int]] | None = None,
    nan: int | None = None,
    compiled: bool = False,
    load: str | None = None,
    save: str | None = None,
    within: int | ShardWithin = ShardWithin.all,
    copies: bool = False,
    direct: bool = True,
    evaluate: bool = False,
    note_updates: bool = False,
) -> dict[str, Any]:
    """accumulations: microbatches of each step; (): those of the layout.

    copies: exchanges as those by copy engines. direct: whether gradients may stay in bf16. evaluate: before each step.
    unused: by step, the ranks on which a weight gets no gradient. nan: the step in which the last rank has a gradient of NaN.
    """
    with (
        exchanging(way, direct, note_updates),
        patch.object(matrix_jobs, "DeepSpeedEngine", compile_first if compiled else DeepSpeedEngine),
    ):
        engine, groups = make_engine(
            layout, load, overlap, torch.bfloat16 if bf16 else torch.float32, sums_bf16, within, copies
        )
        note_end_of_backward(engine)
        results = []
        for step in range(first, first + steps):
            EVENTS.clear()
            if accumulations:
                engine.set_batch_size(ROWS, ROWS // groups.data_size // accumulations[step - first])
            if evaluate:
                look(engine)
            broken = engine.engine.module.blocks[0].mlp.down.weight
            if step == nan and groups.rank == groups.world_size - 1:
                hook = broken.register_hook(lambda gradient: gradient * torch.nan)
            with without_gradient(engine, (unused or {}).get(step, ()), groups):
                results.append(train_step(engine, groups, step))
            if step == nan and groups.rank == groups.world_size - 1:
                hook.remove()
        events = list(EVENTS)
        check_copies(engine, groups, first + steps)
        if save:
            save_checkpoint(Path(save), engine, groups, TrainState(step=first + steps, applied_steps=first + steps))
        return {
            "losses": [loss for loss, _ in results],
            "norms": [norm for _, norm in results],
            "state": digests(engine),
            "events": events,
            "direct": engine.exchange is not None and engine.exchange.direct,
            "cut": number_cut(engine),
            "elements": sum(weight.numel() for weight in engine.module.parameters()),
        }
