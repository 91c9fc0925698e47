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
    """Writes traces of step `at` to profile/ in the run folder, and on a GPU a snapshot of the main rank's memory.

    A trace goes on until the first forward pass of the next step has ended, in which the last exchanges of the step may be
    hidden. ranks: how many ranks are traced, from the first on.
    """

    def __init__(self, step: int | None, ranks: int) -> None:
        self.at, self.ranks = step, ranks
        self.begun = False
        self.profile: torch.profiler.profile | None = None
        self.stopped = False
        self.phase: torch.profiler.record_function | None = None  # of the step, as the trace names it

    def agreed(self, run: "Run", agreed: "Agreed") -> None:
        if not self.begun and self.at is not None:
            self.begun, first, last = True, run.state.step + 1, run.plan.total_steps
            if not first <= self.at <= last:
                logger.warning(
                    "train.profile=%d: nothing is profiled, as steps %d to %d are left", self.at, first, last
                )
        if run.state.step + 1 != self.at or run.groups.rank >= self.ranks:
            return
        activities = [torch.profiler.ProfilerActivity.CPU]
        if run.groups.device.type == "cuda":
            activities.append(torch.profiler.ProfilerActivity.CUDA)
            if run.groups.is_main:
                torch.cuda.memory._record_memory_history()
        self.profile, self.stopped = torch.profiler.profile(activities=activities, profile_memory=True), False
        self.profile.start()
        run.phases.on_mark = self._enter
        self._enter("start")

    def is_due(self, step: int, total_steps: int) -> bool:
        return self.at is not None and step in (self.at, self.at + 1)

    def act(self, run: "Run", done: "Done") -> None:
        if self.profile is None:
            return
        if run.state.step == self.at and run.state.step < run.plan.total_steps:
            self._enter("next")
            run.phases.on_mark = self._end_with_forward
            return
        run.phases.on_mark = None
        self._stop(self.profile)
        with run.watch.paused():
            self._write(run, self.profile)
        self.profile = None

    def _end_with_forward(self, phase: str) -> None:
        if phase == "backward" and self.profile is not None:
            self._stop(self.profile)

    def _stop(self, profile: torch.profiler.profile) -> None:
        if not self.stopped:
            self._leave()
            profile.stop()  # waits for the GPU
            self.stopped = True

    def _enter(self, phase: str) -> None:
        """Names the phase in the trace. eval/benchmarks/step_time.py reads the names."""
        self._leave()
        self.phase = torch.profiler.record_function(f"phase/{phase}")
        self.phase.__enter__()

    def _leave(self) -> None:
        if self.phase is not None:
            self.phase.__exit__(None, None, None)
            self.phase = None

    def _write(self, run: "Run", profile: torch.profiler.profile) -> None:
        folder, rank = run.folder / "profile", run.groups.rank
        history = run.groups.device.type == "cuda" and run.groups.is_main
        name = f"step-{self.at}" if run.groups.is_main else f"step-{self.at}-rank-{rank:05d}"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            profile.export_chrome_trace(str(folder / f"{name}.json.gz"))
            if history:
                torch.cuda.memory._dump_snapshot(str(folder / f"memory-{self.at}.pickle"))
            logger.info("profile of step %d in %s", self.at, folder)
        except OSError as error:
            logger.error("the profile of step %d cannot be written: %s", self.at, error)
        if history:
            torch.cuda.memory._record_memory_history(enabled=None)
