"""The weights of fp8 layers, cast once per optimizer step (`train.fp8`)."""

from collections.abc import Callable, Iterable

import torch
from torch import nn

from ssscale.engine.exchange import Exchange, call_before_parts
from ssscale.model.decoder import Decoder
from ssscale.parallel.fp8 import cast_weight
from ssscale.parallel.megatron import FP8_LAYERS


class WeightCasts:
    """Casts the weights of a block when it first runs with gradients in a step. Later passes of the step read the same casts.

    These are further microbatches, and blocks that backward computes again. Casts never outlive their step, so that an
    update, a loaded checkpoint and a rollback need not announce that they changed weights. Passes without gradients read no
    casts (`ssscale.parallel.megatron`).
    """

    def __init__(self, model: Decoder, exchange: Exchange | None = None) -> None:
        """model: already compiled, if it is to be. exchange: waited for before weights are read."""
        self.exchange = exchange
        self.layers = {layer.weight: layer for layer in model.modules() if isinstance(layer, FP8_LAYERS)}
        compiled = any(block._compiled_call_impl is not None for block in model.blocks)
        self._cast = torch.compile(cast_weight, dynamic=False) if compiled else cast_weight
        call_before_parts(model, self._before)

    def drop(self) -> None:
        """Frees all casts. Called when a step begins, and when its last backward pass has ended."""
        for layer in self.layers.values():
            layer.cast_weight = None

    def _before(self, weights: Iterable[nn.Parameter]) -> Callable[[], None]:
        layers = [self.layers[weight] for weight in weights if weight in self.layers]

        def cast_missing() -> None:
            if torch.is_grad_enabled():
                self._cast_all([layer for layer in layers if layer.cast_weight is None])

        return cast_missing

    @torch.no_grad()
    def _cast_all(self, layers: list[nn.Module]) -> None:
        if layers and self.exchange is not None:
            self.exchange.wait(sorted({self.exchange.bucket_of[layer.weight] for layer in layers}))
        for layer in layers:
            layer.cast_weight = self._cast(layer.weight.detach(), layer.config.linear_fp8)
