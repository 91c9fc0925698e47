"""The interface of hooks, through which a run does more than its steps. `ssscale.train.loop` calls them in their order."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ssscale.train.run import Run
    from ssscale.train.step import Agreed, Done


class Hook:
    """Base class of the hooks. A hook overrides the methods that it needs. All ranks call them together.

    `run.state` describes the run after the last step that has ended.

    every: the hook acts after every `every`-th step, and after the last step of the run. 0: it does not.
    at: the hook acts after this one step. None: it does not.
    """

    every: int = 0
    at: int | None = None

    def agreed(self, run: "Run", agreed: "Agreed") -> None:
        """Called before each step, after all ranks have agreed on `agreed`."""

    def is_due(self, step: int, total_steps: int) -> bool:
        """Whether the hook acts after step `step`."""
        return step == self.at or (self.every > 0 and (step % self.every == 0 or step == total_steps))

    def act(self, run: "Run", done: "Done") -> None:
        """Called after each step for which `is_due` is true. done: the result of the step.

        May raise Stop to end the run, or Rollback to go back to the last checkpoint.
        """
