"""Positions as a bias of the logits: softmax(q·k / √H + bias(i, j)). A bias is part of the softmax core."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from kernels.flex import biased_attention, linear_bias, mlp_bias, table_bias
from ssscale.config.schema import ModelConfig, PositionMethod
from ssscale.layout import PackedLayout
from ssscale.parallel.groups import Groups
from ssscale.parallel.megatron import mark_split, replicated

FIRE_HIDDEN = 32
FIRE_LENGTH = 512.0  # L0: the threshold where L_mult = 1
FIRE_EPS = 1e-6


def alibi_slopes(num_heads: int, heads: range, device: torch.device) -> Tensor:
    """m_h = 2^(−8h / N), h = 1 … N, for the heads h − 1 in `heads`, float32   (arXiv:2108.12409, Section 3)

    Where N is no power of two: the slopes for the power P below it, then every other one of those for 2P.
    """
    power = 1 << (num_heads.bit_length() - 1)
    head = torch.arange(heads.start, heads.stop, device=device, dtype=torch.float32)
    exponent = torch.where(head < power, head + 1, head - power + 0.5)
    return torch.exp2(-8 / power * exponent)


class PositionBias(nn.Module):
    """forward(i [..., Q], j [..., S]) → [..., N, Q, S]: what is added to the logits of queries at i and keys at j ≤ i."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, layout: PackedLayout, scale: float | None) -> Tensor:
        """Softmax attention with this bias by FlexAttention, for a layout that has a block mask."""
        raise NotImplementedError


class ALiBi(PositionBias):
    """−m_h · (i − j)   (arXiv:2108.12409, Eq. 1), for this tensor-parallel rank's heads."""

    def __init__(self, config: ModelConfig, groups: Groups) -> None:
        super().__init__()
        count = config.num_heads // groups.tensor_size
        self.num_heads = config.num_heads
        self.heads = range(groups.tensor_rank * count, (groups.tensor_rank + 1) * count)

    def slopes(self, device: torch.device) -> Tensor:
        return alibi_slopes(self.num_heads, self.heads, device)

    def forward(self, i: Tensor, j: Tensor) -> Tensor:
        distance = (i[..., :, None] - j[..., None, :]).float()
        return -self.slopes(i.device)[:, None, None] * distance.unsqueeze(-3)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, layout: PackedLayout, scale: float | None) -> Tensor:
        score_mod = linear_bias(self.slopes(q.device))
        return biased_attention(q, k, v, score_mod=score_mod, block_mask=layout.block_mask, scale=scale)


class FIRE(PositionBias):
    """MLP(ψ(i − j) / ψ(max(i, |L_mult · L0|))), ψ(x) = ln(|c| · x + 1)   (arXiv:2310.04418, Eqs. 6 and 16)

    The MLP has one input, 32 hidden units with ReLU and an output a head; each layer has its own. c starts at 0.1, L_mult
    at 1, L0 = 512; 1e-6 is added to the denominator. Computes in float32 (float64 for float64 weights).
    """

    def __init__(self, config: ModelConfig, groups: Groups) -> None:
        super().__init__()
        self.groups = groups
        heads = config.num_heads // groups.tensor_size
        self.c = nn.Parameter(torch.full((1,), 0.1))
        self.length_multiplier = nn.Parameter(torch.ones(1))
        self.w1 = nn.Parameter(torch.empty(FIRE_HIDDEN, 1))
        self.b1 = nn.Parameter(torch.empty(FIRE_HIDDEN))
        self.w2 = nn.Parameter(torch.empty(heads, FIRE_HIDDEN))
        self.b2 = nn.Parameter(torch.empty(heads))
        mark_split(self.w2, 0, (config.num_heads,))
        mark_split(self.b2, 0, (config.num_heads,))

    def weights(self) -> dict[str, Tensor]:
        """c, length_multiplier, w1 [32], b1 [32], w2 [N, 32], b2 [N] in the dtype of the computation."""
        dtype = torch.promote_types(self.c.dtype, torch.float32)
        shared = {n: replicated(getattr(self, n), self.groups) for n in ("c", "length_multiplier", "w1", "b1")}
        own = {"w2": self.w2, "b2": self.b2}
        found = {name: weight.to(dtype) for name, weight in (shared | own).items()}
        return found | {"w1": found["w1"][:, 0]}

    @staticmethod
    def reach(weights: dict[str, Tensor], distance: Tensor) -> Tensor:
        """ψ(distance)"""
        return ((weights["c"] * distance).abs() + 1).log()

    @classmethod
    def norm(cls, weights: dict[str, Tensor], i: Tensor) -> Tensor:
        """ψ(max(i, |L_mult · L0|)) + ε"""
        threshold = (weights["length_multiplier"] * FIRE_LENGTH).abs()
        return cls.reach(weights, torch.maximum(i.to(threshold.dtype), threshold)) + FIRE_EPS

    @classmethod
    def values(cls, w: dict[str, Tensor], i: Tensor, j: Tensor) -> Tensor:
        """The bias from `weights`, [..., N, Q, S]."""
        distance = i[..., :, None] - j[..., None, :]
        x = cls.reach(w, distance) / cls.norm(w, i)[..., :, None]
        hidden = (x[..., None] * w["w1"] + w["b1"]).relu()
        return (hidden @ w["w2"].T + w["b2"]).movedim(-1, -3)

    def forward(self, i: Tensor, j: Tensor) -> Tensor:
        return self.values(self.weights(), i, j)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, layout: PackedLayout, scale: float | None) -> Tensor:
        """With gradients: a table of the bias by (i, j) for the longest document, made again in backward. Else in place.

        FlexAttention could differentiate the MLP in place too, but would add every logit's gradient into the same hundred
        numbers by atomics; into the table, each of a document's logits has an entry of its own.
        """
        w = self.weights()
        if torch.is_grad_enabled():
            return _attend_by_table(w, q, k, v, layout, scale)
        reach = self.reach(w, torch.arange(len(q), device=q.device))
        norm = self.norm(w, layout.positions)
        score_mod = mlp_bias(reach, norm, w["w1"], w["b1"], w["w2"], w["b2"])
        return biased_attention(q, k, v, score_mod=score_mod, block_mask=layout.block_mask, scale=scale)


@torch.compiler.disable  # a compiled block's graph breaks here; FlexAttention inside is compiled by itself
def _attend_by_table(
    weights: dict[str, Tensor], q: Tensor, k: Tensor, v: Tensor, layout: PackedLayout, scale: float | None
) -> Tensor:
    def run(q: Tensor, k: Tensor, v: Tensor, *tensors: Tensor) -> Tensor:
        i = torch.arange(layout.max_seqlen, device=q.device)
        table = FIRE.values(dict(zip(weights, tensors, strict=True)), i, i)
        score_mod = table_bias(table, layout.positions)
        return biased_attention(q, k, v, score_mod=score_mod, block_mask=layout.block_mask, scale=scale)

    return _Recomputed.apply(run, q, k, v, *weights.values())


class _Recomputed(torch.autograd.Function):
    """run(*tensors), of which only the tensors are kept.

    Not torch.utils.checkpoint: around FlexAttention it returns wrong gradients of captured tensors without a word.
    """

    @staticmethod
    def forward(ctx: Any, run: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
        ctx.run = run
        ctx.save_for_backward(*tensors)
        return run(*tensors)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        tensors = [x.detach().requires_grad_(x.requires_grad) for x in ctx.saved_tensors]
        wanted = [x for x in tensors if x.requires_grad]
        with torch.enable_grad():
            found = iter(torch.autograd.grad(ctx.run(*tensors), wanted, gradient))
        return (None, *(next(found) if x.requires_grad else None for x in tensors))


def position_bias(config: ModelConfig, groups: Groups) -> PositionBias | None:
    """The bias of the configured method; None for those that rotate q and k, or do nothing."""
    methods: dict[str, type[PositionBias]] = {PositionMethod.alibi: ALiBi, PositionMethod.fire: FIRE}
    method = methods.get(config.position.method)
    return method(config, groups) if method else None
