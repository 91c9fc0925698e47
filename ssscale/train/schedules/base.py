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
    # What it reads of decay_shape, floor, power_a and power_b, and of lr if it follows. Others are refused if they are set.
    # None: it may read all.
    reads: ClassVar[tuple[str, ...] | None] = None

    def check(self, config: ScheduleConfig, key: str) -> None:
        """Raises UserError for options that it cannot use. key: of the section, for the sentence."""

    def rate(self, config: ScheduleConfig, at: Stretch) -> float:
        """Returns the learning rate at a position after the warmup."""
        raise NotImplementedError
