"""`train.tasks`: evaluates tasks during training."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from ssscale.train.hooks.base import Hook

if TYPE_CHECKING:
    from ssscale.train.run import Run
    from ssscale.train.step import Done


class Tasks(Hook):
    def __init__(self, every: int, evaluate: "Callable[[Run], dict[str, float]]") -> None:
        """evaluate: returns metrics of the current weights. It must not change the run."""
        self.every, self.evaluate = every, evaluate

    def act(self, run: "Run", done: "Done") -> None:
        with run.watch.paused():
            run.mark("evaluation")
            run.metrics.write({"step": run.state.step, "tokens": run.state.tokens, **self.evaluate(run)})
