"""AdamW (arXiv:1711.05101, Algorithm 2) by torch's fused implementation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ssscale.config.registry import OPTIMIZERS
from ssscale.errors import UserError
from ssscale.optim.base import Optimizer

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from ssscale.config.schema import Config


@OPTIMIZERS.register("adamw", default=True)
@dataclass(frozen=True)
class AdamW(Optimizer):
    """w ← w − lr · (m̂ / (√v̂ + ε) + weight_decay · w)   (arXiv:1711.05101, Algorithm 2)

    m and v are exponential moving averages of the gradient and of its square, with decay rates β₁ and β₂. m̂ and v̂ are m
    and v with their bias corrected. torch calls m `exp_avg` and v `exp_avg_sq`.
    """

    states = ("exp_avg", "exp_avg_sq")
    momentum = "exp_avg"

    betas: tuple[float, float] = (0.9, 0.95)  # β₁ and β₂
    eps: float = 1e-8  # ε

    @property
    def one_pass(self) -> bool:
        return type(self) is AdamW  # a subclass may make another torch optimizer

    def check(self, config: Config) -> None:
        super().check(config)
        for beta in self.betas:
            if not 0 <= beta < 1:
                bound = "0 or more" if beta < 0 else "less than 1"
                raise UserError(f"optimizer.{self.name}.betas must be {bound}, not {beta}")
        if self.eps <= 0:
            raise UserError(f"optimizer.{self.name}.eps must be greater than 0, not {self.eps}")

    def make(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        import torch

        return torch.optim.AdamW(groups, lr=0.0, betas=tuple(self.betas), eps=self.eps, fused=True)

    def state_after(self, weight: Tensor, steps: int) -> dict[str, Any]:
        import torch

        step = torch.tensor(float(steps), device=weight.device)
        return {"step": step} | {name: torch.zeros_like(weight) for name in self.states}
