"""Which job starts next on which GPUs, and what that makes of a list of jobs."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from eval.evidence.jobs import Job

SHARED = 0.9  # of a GPU's memory, which jobs that share it may declare


@dataclass(frozen=True)
class Place:
    """A job and the names of its GPUs."""

    job: Job
    gpus: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.job.name} on {'GPU ' + ','.join(self.gpus) if self.gpus else 'the CPU'}"


def next_place(
    jobs: Sequence[Job],
    gpus: Mapping[str, float],
    running: Sequence[Place],
    ended: Mapping[str, bool],
    seconds: float,
) -> Place | None:
    """Returns the first job that can start now, or None.

    gpus: GiB of memory by name. ended: whether it ended well, by the name of a job. seconds: how much time is left. No job
    starts that would take longer. Jobs behind one that waits for several GPUs wait as well, so that these become free. Busy
    jobs and those that need the host wait for each other to end.
    """
    others = [place.job for place in running]
    held = any(other.needs_the_host for other in others)  # whether busy jobs wait
    for job in jobs:
        if job.name in ended or any(place.job is job for place in running):
            continue
        if not all(ended.get(name, False) for name in job.after) or 60 * job.minutes > seconds:
            continue
        if job.busy and held:
            continue
        if job.needs_the_host and any(other.busy for other in others):
            held = True
            continue
        found = room(job, gpus, running)
        if found is not None:
            return Place(job, found)
        if job.gpus > 1:
            return None
    return None


def room(job: Job, gpus: Mapping[str, float], running: Sequence[Place]) -> tuple[str, ...] | None:
    """Returns the GPUs on which a job can start now, or None."""
    if job.gpus == 0:
        return ()
    there = {gpu: [place.job for place in running if gpu in place.gpus] for gpu in gpus}
    if job.gib is None:
        free = [gpu for gpu, jobs in there.items() if not jobs]
    else:
        sharing = {gpu: [other.gib for other in jobs if other.gib is not None] for gpu, jobs in there.items()}
        free = [
            gpu
            for gpu, gib in sharing.items()
            if len(gib) == len(there[gpu]) and job.gib + sum(gib) <= SHARED * gpus[gpu]
        ]
        free.sort(key=lambda gpu: not sharing[gpu])  # where a job shares already, so that another GPU stays free
    return tuple(free[: job.gpus]) if len(free) >= job.gpus else None


def simulate(
    jobs: Sequence[Job], gpus: Mapping[str, float], seconds: float
) -> tuple[list[tuple[float, float, Place]], Collection[str]]:
    """Returns when each job would begin and end, in seconds, if it took its minutes; and which would be left.

    Jobs that share a GPU take their minutes too, though they slow each other down.
    """
    found: list[tuple[float, float, Place]] = []
    running: list[tuple[float, Place]] = []
    ended: dict[str, bool] = {}
    now = 0.0
    while True:
        while place := next_place(jobs, gpus, [place for _, place in running], ended, seconds - now):
            end = now + 60 * place.job.minutes
            running.append((end, place))
            found.append((now, end, place))
        if not running:
            return found, [job.name for job in jobs if job.name not in ended]
        running.sort(key=lambda entry: entry[0])
        now, place = running.pop(0)
        ended[place.job.name] = True
