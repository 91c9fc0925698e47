"""What a step's time is made of, and what mixers do inside the model."""

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ssscale.data.batch import Batch
from ssscale.layout import PackedLayout
from ssscale.model.decoder import Attention
from ssscale.parallel.groups import Groups

logger = logging.getLogger("ssscale")


class StepParts:
    """Seconds a step by phase, on the GPU's own clock where there is one.

    `communication` is the reduction behind backward; what ZeRO 2 and 3 reduce meanwhile counts as backward. `data` is
    the wait for the loader, `agreement` the one small reduction over all ranks that a step begins with.
    """

    def __init__(self, cuda: bool) -> None:
        self.cuda = cuda
        self.marks: list[tuple[str, Any]] = []

    def mark(self, phase: str) -> None:
        moment: Any = time.perf_counter()
        if self.cuda:
            moment = torch.cuda.Event(enable_timing=True)
            moment.record()
        self.marks.append((phase, moment))

    def lap(self, steps: int) -> dict[str, float]:
        """`seconds/phase` a step since the last lap."""
        if self.cuda and self.marks:
            self.marks[-1][1].synchronize()
        seconds: Counter[str] = Counter()
        for (phase, begin), (_, end) in pairwise(self.marks):
            seconds[phase] += begin.elapsed_time(end) / 1e3 if self.cuda else end - begin
        self.marks = self.marks[-1:]
        return {f"seconds/{phase}": total / steps for phase, total in seconds.items()}


def observe(model: nn.Module, batch: Batch, groups: Groups) -> dict[str, Any]:
    """What the mixers observe, one value a layer (None where the layer's mixer has none), all tensor-parallel ranks together.

    Learned numbers by head: [layers][heads] (`Mixer.observed_weights`). What they see of a batch (`Mixer.look`) runs the
    microbatch once more, without gradients and torch.compile, and is left out under context parallelism, where no rank may
    have room for whole rows.
    """
    began = time.perf_counter()
    layers: list[Attention] = [block.attention for block in model.blocks]
    found: dict[str, Any] = {}
    weights = [layer.mixer.observed_weights(layer) for layer in layers]
    for name in dict.fromkeys(name for own in weights for name in own):
        local = torch.stack([own[name].detach().float() for own in weights if name in own])
        parts = [torch.empty_like(local) for _ in range(groups.tensor_size)]
        dist.all_gather(parts, local, group=groups.tensor_group)
        values = iter(torch.cat(parts, 1).tolist())
        found[name] = [next(values) if name in own else None for own in weights]
    if any(layer.mixer.observes for layer in layers) and groups.context_size == 1:
        found |= _look_at_all(model, layers, batch, groups)
    return found | {"seconds/observe": time.perf_counter() - began}


def _look_at_all(
    model: nn.Module, layers: list[Attention], batch: Batch, groups: Groups
) -> dict[str, list[float | None]]:
    """name → a value for each layer, from a forward pass."""
    looking = [layer for layer in layers if layer.mixer.observes]
    seen: dict[Attention, Tensor] = {}

    def watch(layer: Attention) -> Callable[..., Tensor]:
        def attend(q: Tensor, k: Tensor, v: Tensor, layout: PackedLayout) -> Tensor:
            seen[layer] = layer.mixer.look(q, k, v, layer, layout)
            return type(layer).attend(layer, q, k, v, layout)

        return attend

    for layer in looking:
        layer.attend = watch(layer)  # type: ignore[method-assign]
    model.eval()
    torch.compiler.set_stance("force_eager")
    try:
        with torch.no_grad():
            model(batch.tokens, batch.layout, batch.labels)
    finally:
        torch.compiler.set_stance("default")
        model.train()
        for layer in looking:
            del layer.attend
    means = torch.cat([seen[layer] for layer in looking])
    dist.all_reduce(means, group=groups.tensor_group)
    values = iter((means / groups.tensor_size).tolist())
    by_layer = {layer: dict(zip(layer.mixer.observes, values)) for layer in looking}
    names = dict.fromkeys(name for own in by_layer.values() for name in own)
    return {name: [by_layer.get(layer, {}).get(name) for layer in layers] for name in names}


@contextmanager
def profiled(folder: Path, step: int, groups: Groups) -> Iterator[None]:
    """torch's profiler trace of what runs inside, and on a GPU a snapshot of its memory, from the main rank."""
    if not groups.is_main:
        yield
        return
    cuda = groups.device.type == "cuda"
    activities = [torch.profiler.ProfilerActivity.CPU] + [torch.profiler.ProfilerActivity.CUDA] * cuda
    folder.mkdir(parents=True, exist_ok=True)
    if cuda:
        torch.cuda.memory._record_memory_history()
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        yield
    try:
        folder.mkdir(parents=True, exist_ok=True)
        profile.export_chrome_trace(str(folder / f"step-{step}.json.gz"))
        if cuda:
            torch.cuda.memory._dump_snapshot(str(folder / f"memory-{step}.pickle"))
        logger.info("profile of step %d in %s", step, folder)
    except OSError as error:
        logger.error("the profile of step %d cannot be written: %s", step, error)
    if cuda:
        torch.cuda.memory._record_memory_history(enabled=None)
