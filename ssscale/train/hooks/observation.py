"""`train.observe_every`: logs what the mixers do inside the model."""

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ssscale.data.batch import Batch
from ssscale.layout import PackedLayout
from ssscale.model.decoder import Attention
from ssscale.parallel.groups import Groups
from ssscale.train.hooks.base import Hook

if TYPE_CHECKING:
    from ssscale.train.run import Run
    from ssscale.train.step import Done


class Observation(Hook):
    """Logs what `observe` finds on the first microbatch of the step."""

    def __init__(self, every: int) -> None:
        self.every = every

    def act(self, run: "Run", done: "Done") -> None:
        with run.watch.paused():
            seen = observe(run.engine.module, done.batches[0].to(run.groups.device), run.groups)
            run.metrics.write({"step": run.state.step, "tokens": run.state.tokens, **seen})


def observe(model: nn.Module, batch: Batch, groups: Groups) -> dict[str, Any]:
    """Returns what the mixers observe, by name: a list with one entry per layer, None if its mixer has no such value.

    Learned numbers (`Mixer.observed_weights`) come as [layers][heads], for the heads of all tensor-parallel ranks. For
    observations of a batch (`Mixer.look`), the microbatch runs again without gradients and torch.compile. They are left
    out under context parallelism, where no rank may have memory for whole rows.
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
    """Returns the values of `Mixer.look` in a forward pass, by name, one per layer."""
    looking = [layer for layer in layers if layer.mixer.observes]
    seen: dict[Attention, Tensor] = {}

    def watch(layer: Attention) -> Callable[..., Tensor]:
        def attend(q: Tensor, k: Tensor, v: Tensor, layout: PackedLayout) -> Tensor:
            found = layer.mixer.look(q, k, v, layer, layout)
            if found.shape != (len(layer.mixer.observes),):
                shape = list(found.shape)
                raise ValueError(f"{layer.mixer.name}.look returned {shape} for its observes={layer.mixer.observes}")
            seen[layer] = found
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
    by_layer = {layer: dict(zip(layer.mixer.observes, values, strict=False)) for layer in looking}
    names = dict.fromkeys(name for own in by_layer.values() for name in own)
    return {name: [by_layer.get(layer, {}).get(name) for layer in layers] for name in names}
