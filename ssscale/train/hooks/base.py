"""What a run does beside its steps. `ssscale.train.loop` calls the hooks of a run in their order."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ssscale.train.run import Run
    from ssscale.train.step import Agreed, Done


class Hook:
    """A hook overrides what it needs. `run.state` is that of the last step that has ended; all ranks call alike.

    every: steps between its turns; it also has one after the last step. 0: it has none of these. at: a single step after
    which it has a turn.
    """

    every: int = 0
    at: int | None = None

    def agreed(self, run: "Run", agreed: "Agreed") -> None:
        """Before each step, once all ranks know what they must know alike."""

    def is_due(self, step: int, total_steps: int) -> bool:
        """Whether it has its turn after this step."""
        return step == self.at or (self.every > 0 and (step % self.every == 0 or step == total_steps))

    def act(self, run: "Run", done: "Done") -> None:
        """Its turn. Raises Stop, or Rollback for going back to the last checkpoint."""
