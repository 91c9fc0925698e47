"""Takes a run's folder into use: locks it, finds the newest whole checkpoint and puts broken ones aside."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch.distributed as dist

from ssscale.config.schema import Config
from ssscale.errors import UserError
from ssscale.parallel.groups import Groups
from ssscale.train.checkpoint_folder import step_of
from ssscale.train.lock import RunLock
from ssscale.train.run_folder import check_folder, record_config
from ssscale.train.whole import from_main, newest_whole, put_aside, record_first_save


class RunFolder:
    """The folder of a run that trains: locked, and with the checkpoint from which the run continues (`choice`).

    All ranks construct it together. An existing folder is locked before its newest checkpoint is chosen. Nothing but the
    lock is written before `take`. Raises UserError if the folder belongs to another configuration, is in use, or has lost
    its checkpoints.
    """

    def __init__(self, path: Path, config: Config, groups: Groups, slurm_job: str | None = None) -> None:
        self.path, self.groups, self.slurm_job = path, groups, slurm_job
        self.lock: RunLock | None = None
        check_folder(path, config)
        with self.opening():
            self._lock(create=False)
            self.choice = newest_whole(path, groups)

    @contextmanager
    def opening(self) -> Iterator[None]:
        """Releases the lock if the body raises."""
        try:
            yield
        except BaseException:
            self.release()
            raise

    def _lock(self, create: bool) -> None:
        dist.barrier()  # no rank writes before all ranks have checked the folder

        def acquire() -> None:
            if self.lock is None and (create or self.path.is_dir()):
                self.path.mkdir(parents=True, exist_ok=True)
                lock = RunLock(self.path, self.slurm_job)
                lock.acquire()
                self.lock = lock

        self._on_main(acquire)

    def take(self, config: Config) -> None:
        """Begins to write to the folder: saves the merged configuration and puts broken checkpoints aside.

        Raises UserError if the folder is in use or cannot be written.
        """
        self._lock(create=True)

        def take() -> None:
            record_config(self.path, config)
            try_to_write(self.path / "checkpoints")
            put_aside(self.choice.broken)
            if self.choice.path is not None:
                record_first_save(self.path, step_of(self.choice.path))

        self._on_main(take)

    def _on_main(self, write: Callable[[], None]) -> None:
        """Calls `write` on the main rank. If it fails, all ranks raise the same UserError."""
        problem = ""
        if self.groups.is_main:
            try:
                write()
            except OSError as error:
                where = f" ({error.filename})" if error.filename else ""
                problem = f"run_dir={self.path} cannot be written: {error.strerror}{where}"
            except UserError as error:
                problem = str(error)
        problem = from_main(problem, self.groups)
        if problem:
            raise UserError(problem)

    def find_again(self) -> Path | None:
        """Returns the checkpoint that is now the newest whole one, or None, and puts broken ones aside. Raises UserError."""
        self.choice = newest_whole(self.path, self.groups)
        self._on_main(lambda: put_aside(self.choice.broken))
        return self.choice.path

    def release(self) -> None:
        if self.lock is not None:
            self.lock.release()


def try_to_write(folder: Path) -> None:
    """Raises OSError if no folder can be made in `folder`, so that a run does not fail at its first save."""
    folder.mkdir(exist_ok=True)
    trial = folder / ".trial.partial"  # the next start removes it, like every uncommitted save
    trial.mkdir(exist_ok=True)
    trial.rmdir()
