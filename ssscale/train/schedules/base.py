"""The interface of a learning-rate schedule."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from ssscale.config.schema import ScheduleConfig


@dataclass(frozen=True)
class Stretch:
    """The position of a step in a run.

    start: tokens that the run trained before this stage. into: tokens of this stage at the end of the step.
    length: tokens of this stage. rows: rows per step.
    before: the learning rate at the end of the stage before; None for the first stage.
    """

    start: int
    into: int
    length: int
    rows: int
    before: float | None


class Schedule:
    """Base class of the schedules. The registration fills in `name`.

    `rate` does not include the warmup, which rises linearly to the value of `rate` at its end.
    """

    name: ClassVar[str]
    decays: ClassVar[bool] = False  # whether it decays over the last `decay_tokens` of the stage
    follows: ClassVar[bool] = False  # whether it fills its stage, from the rate at which the stage before ended

    def rate(self, config: ScheduleConfig, at: Stretch) -> float:
        """Returns the learning rate at a position after the warmup."""
        raise NotImplementedError
