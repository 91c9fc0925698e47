"""`train.profile`: traces one step with torch's profiler."""

import logging
from typing import TYPE_CHECKING

import torch

from ssscale.train.hooks.base import Hook

if TYPE_CHECKING:
    from ssscale.train.run import Run
    from ssscale.train.step import Agreed, Done

logger = logging.getLogger("ssscale")


class Profile(Hook):
    """Writes a trace of step `at`, and on a GPU a snapshot of its memory, to profile/ in the run folder (main rank only)."""

    def __init__(self, step: int | None) -> None:
        self.at = step
        self.profile: torch.profiler.profile | None = None

    def agreed(self, run: "Run", agreed: "Agreed") -> None:
        if run.state.step + 1 != self.at or not run.groups.is_main:
            return
        activities = [torch.profiler.ProfilerActivity.CPU]
        if run.groups.device.type == "cuda":
            activities.append(torch.profiler.ProfilerActivity.CUDA)
            torch.cuda.memory._record_memory_history()
        self.profile = torch.profiler.profile(activities=activities, profile_memory=True)
        self.profile.start()

    def act(self, run: "Run", done: "Done") -> None:
        if self.profile is None:
            return
        with run.watch.paused():
            self._write(run, self.profile)
        self.profile = None

    def _write(self, run: "Run", profile: torch.profiler.profile) -> None:
        profile.stop()
        folder, cuda = run.folder / "profile", run.groups.device.type == "cuda"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            profile.export_chrome_trace(str(folder / f"step-{self.at}.json.gz"))
            if cuda:
                torch.cuda.memory._dump_snapshot(str(folder / f"memory-{self.at}.pickle"))
            logger.info("profile of step %d in %s", self.at, folder)
        except OSError as error:
            logger.error("the profile of step %d cannot be written: %s", self.at, error)
        if cuda:
            torch.cuda.memory._record_memory_history(enabled=None)
