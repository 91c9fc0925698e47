"""The interface of an optimizer. The engine, checkpoints, the guard, the memory estimate and `validate` use it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from ssscale.errors import UserError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from ssscale.config.schema import Config

BYTES = 4  # per element: master weights and optimizer states are fp32


@dataclass(frozen=True)
class Optimizer:
    """Base class of the optimizers. The fields of a subclass are its options, `optimizer.NAME.OPTION`.

    name: filled in by the registration.
    states: names of the fp32 tensors that the optimizer keeps for each weight. They have the weight's shape, and
        checkpoints save them.
    momentum: the state that stays exactly 0 as long as no gradient has reached the weight.
    whole_matrices: whether an update needs the whole matrix, which ZeRO and tensor parallelism would divide.
    gathers_matrices: whether `make`'s optimizer gathers these matrices under ZeRO stage 1 by `ssscale.engine.matrices`. The
        engine then sets its attribute `matrices`.
    """

    name: ClassVar[str]
    states: ClassVar[tuple[str, ...]]
    momentum: ClassVar[str]
    whole_matrices: ClassVar[bool] = False
    gathers_matrices: ClassVar[bool] = False

    def check(self, config: Config) -> None:
        """Raises UserError if the options contradict each other or the parallel layout."""
        parallel = config.parallel
        if self.whole_matrices and (parallel.zero_stage > 0 or parallel.tensor > 1):
            raise UserError(
                f"optimizer.name={self.name} needs whole matrices, which parallel.zero_stage={parallel.zero_stage} and "
                f"parallel.tensor={parallel.tensor} divide: use parallel.zero_stage=0, parallel.tensor=1, "
                "train.precision=fp32"
            )

    def make(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        """Returns the torch optimizer over parameter groups with keys `params`, `weight_decay`, `lr_scale` and `matrix`.

        The engine sets `lr` of each group before each step.
        """
        raise NotImplementedError

    def state_after(self, weight: Tensor, steps: int) -> dict[str, Any]:
        """Returns the optimizer's `state[weight]` as it is after `steps` steps.

        The values of `states` do not matter, because they are then filled from a checkpoint.
        """
        raise NotImplementedError

    def settings(self, name: str, weight: Tensor, config: Config) -> dict[str, Any]:
        """Returns the settings of the parameter group that a weight joins, as `settings_of` does."""
        return settings_of(name, weight.dim(), config)

    def states_of(self, name: str, weight: Tensor) -> tuple[str, ...]:
        """Returns the names of the states that the optimizer keeps for this weight: all or some of `states`."""
        return self.states

    def state_in(self, group: dict[str, Any], weight: Tensor, steps: int) -> dict[str, Any]:
        """Returns `state_after` for a weight, or a partition of weights, of this parameter group."""
        return self.state_after(weight, steps)

    def mean_state_bytes(self, matrices: float) -> float:
        """Returns the bytes of optimizer state per parameter of a model.

        matrices: the share of its parameters that are in the projections of the blocks.
        """
        return self.state_bytes

    @property
    def one_pass(self) -> bool:
        """Whether `ssscale_kernels.adamw` computes the same update. It then replaces `make`'s optimizer if `in_one_pass`."""
        return False

    @property
    def state_bytes(self) -> int:
        """Bytes of optimizer state per parameter, without the master weight."""
        return BYTES * len(self.states)


def in_one_pass(config: Config, bf16: bool) -> bool:
    """Whether `ssscale.engine.update` updates the weights; DeepSpeed's own step and the torch optimizer do otherwise.

    bf16: whether the weights are bf16. The update also rounds its result to them. It works on the flat fp32 buffers of ZeRO
    stage 1; other stages keep gradients elsewhere.
    """
    return bf16 and config.parallel.zero_stage == 1 and config.optimizer.chosen.one_pass


def settings_of(name: str, dimensions: int, config: Config) -> dict[str, Any]:
    """Returns the settings of the weight `name`, a tensor of rank `dimensions`, for the parameter group that it joins.

    weight_decay: `optimizer.weight_decay` for tensors of rank 2 or more, else 0.
    lr_scale: the factor on the learning rate. 1 / m_width (`model.width.matrix_lr_divisor`) for matrices of the blocks, 1
        for the embedding and the head, `optimizer.vector_lr_multiplier` for vectors.
    matrix: whether it is a matrix of a block, that is, of rank 2 or more and neither the embedding nor the head.
    """
    from ssscale.model.decoder import VOCAB_WEIGHTS

    inner = dimensions >= 2 and name not in VOCAB_WEIGHTS
    scale = 1.0 / config.model.matrix_lr_divisor if inner else 1.0
    if dimensions < 2:
        scale = config.optimizer.vector_lr_multiplier
    decay = config.optimizer.weight_decay if dimensions >= 2 else 0.0
    return {"weight_decay": decay, "lr_scale": scale, "matrix": inner}
