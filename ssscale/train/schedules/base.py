"""What a schedule declares."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from ssscale.config.schema import ScheduleConfig


@dataclass(frozen=True)
class Stretch:
    """Where a step lies: `into` of a stage's `length` tokens, of which the run had trained `start` before; `rows` a step.

    before: the learning rate at which the stage before ended; None: there is none.
    """

    start: int
    into: int
    length: int
    rows: int
    before: float | None


class Schedule:
    """`name` is filled in by the registration. The warmup, linear to where the schedule is then, is around it."""

    name: ClassVar[str]
    decays: ClassVar[bool] = False  # over `decay_tokens` at the end of the stage
    follows: ClassVar[bool] = False  # from where the stage before ended, without warmup, over the whole stage

    def rate(self, config: ScheduleConfig, at: Stretch) -> float:
        """The learning rate behind the warmup."""
        raise NotImplementedError
