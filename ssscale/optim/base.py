"""What an optimizer declares. The engine, checkpoints, the guard, the estimate and `validate` read it from here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from ssscale.errors import UserError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from ssscale.config.schema import Config

BYTES = 4  # per element: weights that are trained and the optimizer's states are fp32


@dataclass(frozen=True)
class Optimizer:
    """One optimizer; its fields are its options, `optimizer.NAME.OPTION`.

    states: names of the fp32 tensors that it keeps for each weight, of the weight's shape. Checkpoints hold them.
    momentum: the state that stays exactly 0 for a weight that no gradient has reached.
    whole_matrices: its update of a matrix needs all of it, which ZeRO would divide.
    """

    name: ClassVar[str]
    states: ClassVar[tuple[str, ...]]
    momentum: ClassVar[str]
    whole_matrices: ClassVar[bool] = False

    def check(self, config: Config) -> None:
        """Raise UserError where the options do not go together, or with the layout."""
        parallel = config.parallel
        if self.whole_matrices and (parallel.zero_stage > 0 or parallel.tensor > 1):
            raise UserError(
                f"optimizer.name={self.name} needs whole matrices, which parallel.zero_stage={parallel.zero_stage} and "
                f"parallel.tensor={parallel.tensor} divide: use parallel.zero_stage=0, parallel.tensor=1, "
                "train.precision=fp32"
            )

    def make(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        """Over parameter groups with `params`, `weight_decay` and `matrix`; `lr` is set before each step."""
        raise NotImplementedError

    def state_after(self, weight: Tensor, steps: int) -> dict[str, Any]:
        """What `make`'s optimizer keeps for a weight after so many steps; its `states` are then filled from a checkpoint."""
        raise NotImplementedError

    @property
    def state_bytes(self) -> int:
        """For each parameter, the weight itself left out."""
        return BYTES * len(self.states)


def settings_of(name: str, dimensions: int, config: Config) -> dict[str, Any]:
    """A weight's settings: `weight_decay` on tensors of rank 2 and more, `lr_scale` of matrices and of vectors, `matrix`.

    matrix: whether it multiplies activations; the embedding and the head do not count.
    """
    from ssscale.model.decoder import VOCAB_WEIGHTS

    inner = dimensions >= 2 and name not in VOCAB_WEIGHTS
    scale = 1.0 / config.model.matrix_lr_divisor if inner else 1.0
    if dimensions < 2:
        scale = config.optimizer.vector_lr_multiplier
    decay = config.optimizer.weight_decay if dimensions >= 2 else 0.0
    return {"weight_decay": decay, "lr_scale": scale, "matrix": inner}
