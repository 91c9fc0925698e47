"""An optimizer that needs whole matrices, in one file: momentum, whose matrices are replaced by the nearest orthogonal ones.

m ← μ m + g; w ← w − lr · U Vᵀ with m = U Σ Vᵀ for matrices, and w − lr · m for what is none of these (the idea of Muon).
SSSCALE_PLUGINS names this file; nothing else knows of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ssscale.config.registry import OPTIMIZERS
from ssscale.optim.base import Optimizer

if TYPE_CHECKING:
    import torch
    from torch import Tensor


@OPTIMIZERS.register("orthogonal")
@dataclass(frozen=True)
class Orthogonal(Optimizer):
    states = ("momentum",)
    momentum = "momentum"
    whole_matrices = True

    mu: float = 0.9

    def make(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        import torch

        class Orthogonalized(torch.optim.Optimizer):
            @torch.no_grad()
            def step(self, closure: Any = None) -> None:  # type: ignore[override]
                for group in self.param_groups:
                    for weight in filter(lambda weight: weight.grad is not None, group["params"]):
                        state = self.state[weight]
                        momentum = state.setdefault("momentum", torch.zeros_like(weight))
                        momentum.mul_(group["mu"]).add_(weight.grad)
                        update = momentum
                        if group["matrix"]:
                            left, _, right = torch.linalg.svd(momentum, full_matrices=False)
                            update = left @ right
                        weight.mul_(1 - group["lr"] * group["weight_decay"]).sub_(update, alpha=group["lr"])

        return Orthogonalized(groups, {"lr": 0.0, "mu": self.mu})

    def state_after(self, weight: Tensor, steps: int) -> dict[str, Any]:
        return {"momentum": weight.new_zeros(weight.shape)}
