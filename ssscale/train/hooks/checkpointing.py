"""`train.save_every`: saves checkpoints while training continues."""

from pathlib import Path
from typing import TYPE_CHECKING

from ssscale.config import to_yaml
from ssscale.config.schema import Config
from ssscale.errors import UserError
from ssscale.parallel.groups import Groups
from ssscale.train.hooks.base import Hook
from ssscale.train.save import CheckpointWriter, Retention, Saved

if TYPE_CHECKING:
    from ssscale.train.run import Run
    from ssscale.train.step import Agreed, Done


class Checkpointing(Hook):
    """Starts saves, and commits them once all ranks have written. saved_step: the newest step that is saved."""

    def __init__(self, folder: Path, config: Config, groups: Groups, saved_step: int) -> None:
        """folder: of the run. All ranks construct it together."""
        train = config.train
        self.every, self.background = train.save_every, train.save_background
        self.folder, self.saved_step = folder, saved_step
        retention = Retention(train.keep, train.keep_every, train.keep_best)
        self.writer = CheckpointWriter(folder / "checkpoints", groups, retention, run=folder)

    def agreed(self, run: "Run", agreed: "Agreed") -> None:
        if agreed.written:
            with run.watch.paused():
                self._note(run, self.writer.finish(whole=not agreed.failed))

    def act(self, run: "Run", done: "Done") -> None:
        with run.watch.paused():
            run.mark("checkpoint")
            self.save(run, wait=not self.background)

    def save(self, run: "Run", wait: bool = False) -> None:
        """Writes a checkpoint of the last step, in the background unless `wait` is true."""
        if self.writer.active:
            self._note(run, self.writer.wait())
        self.writer.start(run.engine, run.state, {"config.yaml": to_yaml(run.config), **run.source.files()})
        if wait:
            self._note(run, self.writer.wait())

    def save_now(self, run: "Run") -> bool:
        """Saves the last step unless it is saved already. Returns False if that fails."""
        if self.writer.active:
            self._note(run, self.writer.wait())
        if run.state.step != self.saved_step:
            self.save(run, wait=True)
        return run.state.step == self.saved_step

    def save_beginning(self, run: "Run") -> None:
        """Saves the initial weights of a run that has no steps. Raises UserError if that fails."""
        self.saved_step = -1
        if not self.save_now(run):
            raise UserError(f"the weights could not be saved in {self.folder}: make room there")

    def finish(self, run: "Run") -> None:
        """Waits for the last save. Raises UserError if the last step could not be saved."""
        if self.writer.active:
            self._note(run, self.writer.wait())
        if self.every and self.saved_step != run.state.step:
            raise UserError(
                f"the last step could not be saved in {self.folder}: make room there; the same command trains again "
                f"from step {self.saved_step}"
            )

    def _note(self, run: "Run", saved: Saved | None) -> None:
        if saved is not None:
            self.saved_step = saved.step
            run.metrics.write({"step": saved.step, **saved.record(), "save_dip": run.watch.dip()})
