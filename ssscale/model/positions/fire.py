"""FIRE: a learned bias of the distance relative to the position of the query."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ssscale.config.registry import POSITIONS
from ssscale.model.positions.bias import BiasPosition
from ssscale.model.weight import Weight

if TYPE_CHECKING:
    from torch import Tensor

    from ssscale.config.schema import ModelConfig
    from ssscale.layout import PackedLayout
    from ssscale.model.decoder import Attention

HIDDEN = 32
LENGTH = 512.0  # L0, the threshold if L_mult = 1
EPS = 1e-6


@POSITIONS.register("fire")
@dataclass(frozen=True)
class FIRE(BiasPosition):
    """bias(i, j) = MLP(ψ(i − j) / ψ(max(i, |L_mult · L0|))), ψ(x) = ln(|c| · x + 1)   (arXiv:2310.04418, Eqs. 6 and 16)

    The MLP has one input, 32 hidden units with ReLU and one output per head. Each layer has its own. It is initialised
    as torch initialises a Linear layer, from U(−1 / sqrt(inputs), 1 / sqrt(inputs)). c starts at 0.1, L_mult at 1; L0 =
    512. 1e-6 is added to the denominator. Computes in float32 (float64 for float64 weights).
    """

    exported = True
    varies = "a GPU adds up the gradients of its weights in no fixed order"

    def weights(self, model: ModelConfig) -> dict[str, Weight]:
        heads, bound = model.num_heads, HIDDEN**-0.5
        return {
            "c": Weight((1,), start=0.1),
            "length_multiplier": Weight((1,), start=1.0),
            "w1": Weight((HIDDEN, 1), bound=1.0),
            "b1": Weight((HIDDEN,), bound=1.0),
            "w2": Weight((heads, HIDDEN), bound=bound, split=0),
            "b2": Weight((heads,), bound=bound, split=0),
        }

    def bias(self, layer: Attention) -> FIREBias:
        return FIREBias(layer.position_weights.all())

    def kept_bytes(self, heads: float, length: int) -> float:
        """Bytes for one layer at a time: (2·N + 4·32)·L² fp32 numbers, L = length.

        They are the table of the bias and its gradient, and the MLP's hidden layer before and after ReLU with their
        gradients. Compiled, the hidden layer takes less.
        """
        return 4 * (2 * heads + 4 * HIDDEN) * length**2


@functools.cache
def _compiled_values() -> Callable[[dict[str, Tensor], Tensor, Tensor], Tensor]:
    import torch

    return torch.compile(FIREBias.values)  # the hidden layer is 32 numbers for each pair of positions


class FIREBias:
    """The bias with the weights c [1], length_multiplier [1], w1 [32, 1], b1 [32], w2 [N, 32] and b2 [N]."""

    def __init__(self, weights: dict[str, Tensor]) -> None:
        import torch

        dtype = torch.promote_types(weights["c"].dtype, torch.float32)
        self.weights = {name: weight.to(dtype) for name, weight in weights.items()}
        self.weights["w1"] = self.weights["w1"][:, 0]

    def narrow(self, first: int, count: int) -> FIREBias:
        found = FIREBias.__new__(FIREBias)
        found.weights = self.weights | {name: self.weights[name].narrow(0, first, count) for name in ("w2", "b2")}
        return found

    @staticmethod
    def reach(weights: dict[str, Tensor], distance: Tensor) -> Tensor:
        """ψ(distance)"""
        return ((weights["c"] * distance).abs() + 1).log()

    @classmethod
    def norm(cls, weights: dict[str, Tensor], i: Tensor) -> Tensor:
        """ψ(max(i, |L_mult · L0|)) + ε"""
        import torch

        threshold = (weights["length_multiplier"] * LENGTH).abs()
        return cls.reach(weights, torch.maximum(i.to(threshold.dtype), threshold)) + EPS

    @classmethod
    def values(cls, w: dict[str, Tensor], i: Tensor, j: Tensor) -> Tensor:
        """Returns the bias [..., N, Q, S] for query positions i [..., Q] and key positions j [..., S]."""
        distance = i[..., :, None] - j[..., None, :]
        x = cls.reach(w, distance) / cls.norm(w, i)[..., :, None]
        hidden = (x[..., None] * w["w1"] + w["b1"]).relu()
        return (hidden @ w["w2"].T + w["b2"]).movedim(-1, -3)

    def __call__(self, i: Tensor, j: Tensor) -> Tensor:
        return self.values(self.weights, i, j)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, layout: PackedLayout, scale: float | None) -> Tensor:
        """Computes softmax attention with the bias, [T, N, H].

        With gradients, FlexAttention reads the bias from a table over (i, j) of the longest document, which backward
        builds again. Without gradients, the bias is computed inside the kernel. Computing it there with gradients would
        work too, but would add the gradient of every logit to the same hundred numbers by atomics. In the table, each
        logit of a document has an entry.
        """
        import torch
        from ssscale_kernels.flex import biased_attention, mlp_bias, table_attention

        w, mask = self.weights, layout.block_mask
        if torch.is_grad_enabled():
            names = list(w)

            def table(i: Tensor, *tensors: Tensor) -> Tensor:
                values = _compiled_values() if i.is_cuda else FIREBias.values
                return values(dict(zip(names, tensors, strict=True)), i, i)

            return table_attention(
                table, tuple(w.values()), q, k, v, layout.positions, layout.max_seqlen, block_mask=mask, scale=scale
            )
        reach = self.reach(w, torch.arange(len(q), device=q.device))
        score_mod = mlp_bias(reach, self.norm(w, layout.positions), w["w1"], w["b1"], w["w2"], w["b2"])
        return biased_attention(q, k, v, score_mod=score_mod, block_mask=mask, scale=scale, loads=True)
