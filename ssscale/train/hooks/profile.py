"""`train.profile`: torch's trace of one step."""

import logging
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from ssscale.parallel.groups import Groups
from ssscale.train.hooks.base import Hook

if TYPE_CHECKING:
    from ssscale.train.run import Run

logger = logging.getLogger("ssscale")


class Profile(Hook):
    def __init__(self, step: int | None) -> None:
        self.step = step

    def around(self, run: "Run", step: int) -> AbstractContextManager[object]:
        return profiled(run.folder / "profile", step, run.groups) if step == self.step else nullcontext()


@contextmanager
def profiled(folder: Path, step: int, groups: Groups) -> Iterator[None]:
    """torch's profiler trace of what runs inside, and on a GPU a snapshot of its memory, from the main rank."""
    if not groups.is_main:
        yield
        return
    cuda = groups.device.type == "cuda"
    activities = [torch.profiler.ProfilerActivity.CPU] + [torch.profiler.ProfilerActivity.CUDA] * cuda
    folder.mkdir(parents=True, exist_ok=True)
    if cuda:
        torch.cuda.memory._record_memory_history()
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        yield
    try:
        folder.mkdir(parents=True, exist_ok=True)
        profile.export_chrome_trace(str(folder / f"step-{step}.json.gz"))
        if cuda:
            torch.cuda.memory._dump_snapshot(str(folder / f"memory-{step}.pickle"))
        logger.info("profile of step %d in %s", step, folder)
    except OSError as error:
        logger.error("the profile of step %d cannot be written: %s", step, error)
    if cuda:
        torch.cuda.memory._record_memory_history(enabled=None)
