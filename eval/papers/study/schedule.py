"""How long jobs take that share a GPU, and which jobs fit into a stay on a machine."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from eval.papers.study.jobs import Job

TOGETHER = 1.3  # several jobs on one GPU do this much work in the time of one (eval/papers: 3 jobs, two H200s)


class Work(NamedTuple):
    """A step that is left. minutes: alone on a GPU. alone: whether nothing else may run on its GPU meanwhile."""

    marker: Path
    minutes: float
    alone: bool


def slowdown(jobs: int) -> float:
    """Return the factor by which each of `jobs` jobs on one GPU takes longer than alone."""
    return 1.0 if jobs < 2 else jobs / TOGETHER


def works(job: Job, done: float = 0.0) -> list[Work]:
    """Return the steps of a job that are left. done: minutes of the first one that have passed."""
    left = [Work(step.marker, step.left, step.alone) for step in job.left]
    return [left[0]._replace(minutes=max(0.0, left[0].minutes - done)), *left[1:]] if left else []


def shared(minutes: Iterable[float], per_gpu: int) -> float:
    """Return the minutes until all jobs have ended that share a GPU, `per_gpu` at a time, in their order."""
    waiting = list(minutes)
    running: list[float] = []
    total = 0.0
    while waiting or running:
        while waiting and len(running) < per_gpu:
            running.append(waiting.pop(0))
        first = min(running)
        total += first * slowdown(len(running))
        running = [left - first for left in running if left > first]
    return total


def duration(jobs: Sequence[Sequence[Work]], per_gpu: int) -> float:
    """Return the minutes that jobs take on one GPU. A step that several jobs share counts once, as the least that is left.

    It assumes that steps which need the GPU alone come before the others, and that jobs never wait for each other
    otherwise.
    """
    least: dict[Path, float] = {}
    for work in (work for job in jobs for work in job):
        least[work.marker] = min(work.minutes, least.get(work.marker, work.minutes))
    alone, rest = 0.0, []
    counted: set[Path] = set()
    for job in jobs:
        new = [work for work in job if work.marker not in counted]
        counted |= {work.marker for work in new}
        alone += sum(least[work.marker] for work in new if work.alone)
        rest.append(sum(least[work.marker] for work in new if not work.alone))
    return alone + shared(rest, per_gpu)


def minutes_of(jobs: Sequence[Job], per_gpu: int) -> float:
    return duration([works(job) for job in jobs], per_gpu)


def units(jobs: Sequence[Job]) -> list[list[Job]]:
    """Group jobs that must be in one stay, because they measure one model, in the order of the first of each group."""
    found: dict[str, list[Job]] = {}
    for job in jobs:
        found.setdefault(job.group or job.label, []).append(job)
    return list(found.values())


def tries_rates(job: Job) -> bool:
    return job.name.startswith("rate-")


def stays(jobs: Sequence[Job], minutes: float, per_gpu: int) -> list[list[Job]]:
    """Divide jobs into stays of `minutes` on one GPU, by the declared minutes. A unit goes into the first with room.

    Jobs that try learning rates have stays of their own, because the choice comes before the other jobs.
    """
    found: list[list[Job]] = []
    for unit in units(jobs):
        rooms = [stay for stay in found if tries_rates(stay[0]) == tries_rates(unit[0])]
        there = next((stay for stay in rooms if minutes_of([*stay, *unit], per_gpu) <= minutes), None)
        if there is None:
            found.append([*unit])
        else:
            there += unit
    return found


def plan(jobs: Sequence[Job], minutes: float, per_gpu: int) -> str:
    """Return the stays as a table in Markdown. A stay that is too long is said."""
    lines = ["| stay | minutes | jobs (minutes of their steps, alone on one H200) |", "|---|---|---|"]
    total = 0.0
    for number, some in enumerate(stays(jobs, minutes, per_gpu), 1):
        took = minutes_of(some, per_gpu)
        total += took
        counted: set[Path] = set()
        cells = []
        for job in some:
            new = [step for step in job.left if step.marker not in counted]
            counted |= {step.marker for step in new}
            cells.append(f"{job.label} ({', '.join(f'{step.name} {step.left:.1f}' for step in new)})")
        over = " **longer than a stay**" if took > minutes else ""
        lines.append(f"| {number} | {took:.0f}{over} | {'; '.join(cells)} |")
    return "\n".join([*lines, f"| all | {total:.0f} | |"])
