"""Muon for the matrices of the blocks, AdamW for all other weights. `ssscale.engine.muon` computes both."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from ssscale.config.registry import OPTIMIZERS
from ssscale.errors import UserError
from ssscale.optim.base import BYTES, Optimizer, settings_of

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from ssscale.config.schema import Config


class Dtype(StrEnum):
    """A number format of 4 or 2 bytes."""

    fp32 = "fp32"
    bf16 = "bf16"

    @property
    def size(self) -> int:
        return 4 if self is Dtype.fp32 else 2


@OPTIMIZERS.register("muon")
@dataclass(frozen=True)
class Muon(Optimizer):
    """m ← μ m + (1 − μ) g; u = μ m + (1 − μ) g; w ← w − lr · (rms · sqrt(max(rows, columns)) · NS(u) + weight_decay · w)

    (https://kellerjordan.github.io/posts/muon; arXiv:2502.16982, Eq. 4; `torch.optim.Muon` with `match_rms_adamw`.) NS is
    the Newton-Schulz iteration, which moves all singular values of u close to 1. Without `nesterov`, u = m. The factor
    gives the update the root mean square `rms` per element, which is about that of AdamW's. So AdamW's learning rates
    carry over.

    Muon updates the projections of attention and MLP: Q, K, V, the output, gate, up and down, each as one matrix. All
    other weights, which are embedding, head, vectors and what mixers and positions learn, are updated by AdamW. m is kept
    as `exp_avg`.
    """

    states = ("exp_avg", "exp_avg_sq")
    momentum = "exp_avg"
    whole_matrices = True
    gathers_matrices = True

    mu: float = 0.95  # μ, the decay rate of the momentum
    nesterov: bool = True  # u looks one step ahead of the momentum
    rms: float = 0.2  # root mean square of an update per element, before the learning rate
    newton_schulz_steps: int = 5  # iterations of Newton-Schulz
    newton_schulz_dtype: Dtype = Dtype.bf16  # in which matrices are sent and multiplied: bf16, fp32
    momentum_dtype: Dtype = Dtype.fp32  # in which the momentum of matrices is kept: fp32, bf16
    betas: tuple[float, float] = (0.9, 0.95)  # β₁ and β₂ of AdamW
    eps: float = 1e-8  # ε of AdamW

    def check(self, config: Config) -> None:
        stage = config.parallel.zero_stage
        if stage != 1:
            raise UserError(
                f"optimizer.name={self.name} needs parallel.zero_stage=1, not {stage}: whole matrices are gathered from the "
                "partitions of this stage only"
            )
        for key, value in (("mu", self.mu), ("betas", self.betas[0]), ("betas", self.betas[1])):
            if not 0 <= value < 1:
                raise UserError(f"optimizer.{self.name}.{key} must be 0 or more and less than 1, not {value}")
        for key in ("rms", "eps"):
            if getattr(self, key) <= 0:
                raise UserError(f"optimizer.{self.name}.{key} must be greater than 0, not {getattr(self, key)}")
        if not 1 <= self.newton_schulz_steps <= 20:
            raise UserError(
                f"optimizer.{self.name}.newton_schulz_steps must be from 1 to 20, not {self.newton_schulz_steps}: 5 are usual"
            )

    def make(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        from ssscale.engine.muon import MuonAdamW

        return MuonAdamW(groups, self)

    def settings(self, name: str, weight: Tensor, config: Config) -> dict[str, Any]:
        """Returns AdamW's settings, in which `matrix` says whether Muon updates the weight.

        lr_scale of such a matrix: 1 / `model.width.matrix_lr_divisor`, which is sqrt(m_width) here if it is not given. An
        update of AdamW can have all of its size in one direction. Its spectral norm then grows as the width, so m_width
        divides its learning rate. All singular values of an update of Muon are equal, and at a constant RMS they grow as
        the square root of the width (arXiv:2310.17813, Condition 1, asks for a constant).
        """
        settings = settings_of(name, weight.dim(), config) | {"matrix": is_matrix(name, weight)}
        if settings["matrix"]:
            given = config.model.width.matrix_lr_divisor
            settings["lr_scale"] = 1.0 / (config.model.m_width**0.5 if given is None else given)
        return settings

    def states_of(self, name: str, weight: Tensor) -> tuple[str, ...]:
        return ("exp_avg",) if is_matrix(name, weight) else self.states

    def state_after(self, weight: Tensor, steps: int) -> dict[str, Any]:
        import torch

        step = torch.tensor(float(steps), device=weight.device)
        return {"step": step} | {name: torch.zeros_like(weight) for name in self.states}

    def state_in(self, group: dict[str, Any], weight: Tensor, steps: int) -> dict[str, Any]:
        import torch

        if not group["matrix"]:
            return self.state_after(weight, steps)
        dtype = torch.float32 if self.momentum_dtype is Dtype.fp32 else torch.bfloat16
        return {"exp_avg": torch.zeros_like(weight, dtype=dtype)}

    def mean_state_bytes(self, matrices: float) -> float:
        return matrices * self.momentum_dtype.size + (1 - matrices) * BYTES * len(self.states)


def is_matrix(name: str, weight: Tensor) -> bool:
    """Whether Muon updates the weight: a projection of a block, which tensor parallelism splits.

    Mixers, positions and projections may declare weights of two dimensions. These are lists of numbers by head or by
    distance, and not maps between activations.
    """
    from ssscale.model.decoder import VOCAB_WEIGHTS

    projection = hasattr(weight, "stripes") and not hasattr(weight, "declared")
    return weight.dim() == 2 and projection and name not in VOCAB_WEIGHTS
