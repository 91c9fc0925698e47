"""Runs jobs on the GPUs of one machine, several per GPU, within the time that is left."""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import IO, Any, Protocol

from eval.checkpoint.command import write
from eval.checkpoint.gpus import Gpu
from eval.papers.study import measure
from eval.papers.study.jobs import Job, Place, Step
from eval.papers.study.schedule import duration, slowdown, tries_rates, works
from ssscale.errors import SAVED, UserError
from ssscale.launcher import tied

ROOT = Path(__file__).resolve().parents[3]
MEMORY = 0.9  # share of a GPU's memory that jobs may declare
# Of a GPU: a job trains while fewer than these of earlier jobs do. Five at once train no more tokens in all than one, and
# all end late (docs/log/2026-11-29-trainings-together.md). Two fill the GPU while one of them starts. Beside tests, which
# keep the host busy, it is not idle either.
TRAININGS = 2
START = 0.3  # minutes at the start of a step in which it does not come on
GRACE = 90.0  # seconds that a stopped step may take to save


class Process(Protocol):
    """A running step."""

    def poll(self) -> int | None: ...

    def terminate(self) -> None: ...

    def kill(self) -> None: ...


class Program:
    """A command in a process group of its own, so that a signal reaches the processes that it has started.

    If the runner is killed, it gets SIGTERM, which ends or saves it.
    """

    def __init__(self, command: Sequence[str], environment: dict[str, str], log: IO[str]) -> None:
        self.process = subprocess.Popen(
            [sys.executable, *command],
            cwd=ROOT,
            env=os.environ | environment,
            stdout=log,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=tied(signal.SIGTERM),
        )

    def poll(self) -> int | None:
        return self.process.poll()

    def terminate(self) -> None:
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        self._signal(signal.SIGKILL)

    def _signal(self, number: int) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, number)


@dataclass
class Running:
    """A job that has a GPU. done: minutes of its step as if alone on the GPU, counted up as time passes."""

    job: Job
    gpu: Gpu
    done: float = 0.0
    step: Step | None = None
    process: Process | None = None
    log: IO[str] | None = None
    began: float = 0.0
    together: int = 1


@dataclass
class Runner:
    """Runs jobs until all have ended, or until time is up.

    deadline: no job starts that would end after these seconds. A job that was stopped continues first.
    pause: after these seconds running steps get SIGTERM, which saves, and the same command continues them; at the
        deadline at the latest.
    slower: factor of the declared minutes.
    start: starts a step.
    ready: called after each result; returns all jobs that can start by now, those that are known among them.
    """

    place: Place
    jobs: list[Job]
    gpus: list[Gpu]
    commit: str = "unknown"
    per_gpu: int = 3
    deadline: float = float("inf")
    pause: float = float("inf")
    slower: float = 1.0
    keep_models: bool = False
    start: Callable[[Sequence[str], dict[str, str], IO[str]], Process] = Program
    ready: Callable[[], list[Job]] = list
    running: list[Running] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    postponed: list[str] = field(default_factory=list)
    stopped: bool = False
    written: bool = False  # a result, since `ready` was asked
    began: float = field(default_factory=time.monotonic)
    counted: float = field(default_factory=time.monotonic)

    def run(self) -> int:
        """Run what has no result yet. Returns 0, 1 if a job failed, or 75 if jobs are left."""
        waiting = self._without_result(self.jobs)
        handlers = {number: signal.signal(number, self._stop) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            while (waiting or self.running) and not self.stopped:
                self._collect()
                waiting = self._admit(waiting)
                if self.written:
                    waiting = self._without_result([*waiting, *self._new_jobs()])
                elif not self.running:
                    break
                if self.seconds >= min(self.pause, self.deadline):
                    self.stopped = True
                time.sleep(0.05)
            if self.running:
                self._end_running()
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)
        left = [job.label for job in self.jobs if not job.file.is_file() and job.label not in self.failed]
        if left:
            self.say(f"left for another call: {' '.join(left)}")
        return 1 if self.failed else SAVED if left else 0

    def _without_result(self, jobs: list[Job]) -> list[Job]:
        """Return the jobs that have no result yet: first what was stopped, then learning rates, and seed after seed."""
        waiting = []
        for job in jobs:
            if job.has_result(self.place):
                self.say(f"{job.label}: has its result")
            else:
                waiting.append(job)
        return sorted(waiting, key=lambda job: (not job.begun, not tries_rates(job), job.seed))

    def _new_jobs(self) -> list[Job]:
        """Return the jobs that can start since a result was written."""
        self.written = False
        known = {job.label for job in self.jobs}
        new = [job for job in self.ready() if job.label not in known]
        self.jobs = [*self.jobs, *new]
        return new

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.began

    def say(self, text: str) -> None:
        print(f"{self.seconds:6.0f} s  {text}", flush=True)

    def _stop(self, number: int, frame: FrameType | None) -> None:
        self.stopped = True

    def _on(self, gpu: Gpu) -> list[Running]:
        return [running for running in self.running if running.gpu is gpu]

    def _busy(self, gpu: Gpu) -> list[Running]:
        """The jobs whose steps run now. The others wait for a step that another job runs, or for the GPU alone."""
        return [running for running in self._on(gpu) if running.process is not None]

    def _count(self) -> None:
        """Add the work that has been done since the last call."""
        now = time.monotonic()
        for gpu in self.gpus:
            busy = self._busy(gpu)
            for running in busy:
                running.done += (now - self.counted) / 60 / slowdown(len(busy)) / self.slower
        self.counted = now

    def _admit(self, waiting: list[Job]) -> list[Job]:
        """Start the next step of every job that has a GPU, and jobs that fit. Returns the jobs that still wait."""
        self._count()
        for running in [running for running in self.running if running.process is None]:
            self._next_step(running)
        later = []
        for job in waiting:
            gpu = min(self.gpus, key=lambda gpu: (not self._goes_with(job, gpu), len(self._on(gpu))))
            there = self._on(gpu)
            fits = sum(_memory(some, gpu) for some in (job, *(other.job for other in there))) <= MEMORY * gpu.gib
            if self.stopped or len(there) >= self.per_gpu or (there and not fits) or not self._goes_with(job, gpu):
                later.append(job)
            elif not (job.begun or self._in_time([job, *_mates(job, waiting)], there)):
                later.append(job)
                if job.label not in self.postponed:
                    self.postponed.append(job.label)
                    self.say(f"{job.label}: not started, {job.minutes * self.slower:.1f} minutes would end too late")
            else:
                running = Running(job, gpu)
                self.running.append(running)
                self._next_step(running)
        return later

    def _goes_with(self, job: Job, gpu: Gpu) -> bool:
        """Whether a job can run beside those of a GPU. One that needs it alone to its end would only hold a place there."""
        there = self._on(gpu)
        return not there or not any(_alone(some) for some in (job, *(running.job for running in there)))

    def _in_time(self, jobs: list[Job], there: list[Running]) -> bool:
        """Whether jobs that measure one model, and those on the GPU, would end before the deadline."""
        left = [works(running.job, running.done) for running in there]
        minutes = duration([*left, *(works(job) for job in jobs)], self.per_gpu) * self.slower
        return self.seconds + 60 * minutes <= self.deadline

    def _trainings_before(self, running: Running) -> int:
        """Count the trainings on its GPU of jobs that started before it. One that packs first is not held up by later ones."""
        before = self.running[: self.running.index(running)]
        return sum(other.step.trains for other in before if other.gpu is running.gpu and other.step)

    def _next_step(self, running: Running) -> None:
        """Start the next step, unless another job runs the same one. Without one, write the result."""
        left = running.job.left
        if not left:
            self._finish(running)
            return
        step, busy = left[0], self._busy(running.gpu)
        if self.stopped or any(other.step and other.step.marker == step.marker for other in self.running):
            return
        there = [other.step for other in busy if other.step]
        if busy and (step.alone or any(other.alone for other in there)):
            return
        if step.trains and self._trainings_before(running) >= TRAININGS:
            return
        file = self.place.work / "logs" / f"{running.job.label.replace('/', '-')}-{step.name}.log"
        file.parent.mkdir(parents=True, exist_ok=True)
        step.folder.mkdir(parents=True, exist_ok=True)
        # With several threads, torch's small copies wait for cores that other jobs use (docs/log/2026-11-24-cpu-threads.md).
        threads = os.environ.get("OMP_NUM_THREADS", "1")
        environment = {"CUDA_VISIBLE_DEVICES": running.gpu.name, "OMP_NUM_THREADS": threads} if running.gpu.name else {}
        running.log = file.open("a", encoding="utf-8")
        running.step, running.began, running.together, running.done = step, time.monotonic(), len(busy) + 1, 0.0
        running.process = self.start(step.command, environment, running.log)
        where = f"GPU {running.gpu.name}" if running.gpu.name else "the CPU"
        self.say(f"{running.job.label}: {step.name} on {where}")

    def _collect(self) -> None:
        """Take note of the steps that have ended."""
        for running in list(self.running):
            code = None if running.process is None else running.process.poll()
            if code is None or running.step is None or running.log is None:
                continue
            step, log = running.step, running.log
            log.close()
            running.step = running.process = running.log = None
            running.done = 0.0
            seconds = round(time.monotonic() - running.began, 1)
            before = step.before
            total = round(before["seconds"] + seconds, 1)
            if code in step.codes:
                write(step.marker, {"seconds": total, "jobs": running.together, "code": code})
                step.paused.unlink(missing_ok=True)
                self.say(f"{running.job.label}: {step.name} took {seconds:.0f} s")
            elif code == SAVED and self.stopped:
                self.say(f"{running.job.label}: {step.name} is saved after {seconds:.0f} s")
                self.running.remove(running)
                self._note_pause(step, running, before, total)
            else:
                how = f"was ended by signal {-code}" if code < 0 else f"failed with code {code}"
                self.say(
                    f"{running.job.label}: {step.name} {how} after {seconds:.0f} s, see {log.name}: {_last(log.name)}"
                )
                self.running.remove(running)
                if self.stopped:
                    self._note_pause(step, running, before, total)
                else:
                    self.failed.append(running.job.label)

    def _note_pause(self, step: Step, running: Running, before: dict[str, float], total: float) -> None:
        minutes = (total - before["seconds"]) / 60 - START
        work = max(0.0, minutes) / slowdown(running.together) / self.slower
        write(step.paused, {"seconds": total, "work": round(before["work"] + work, 2)})

    def _end_running(self) -> None:
        """Ask all running steps to save and end. Steps that do not end are killed, which is said."""
        for running in self.running:
            if running.process is not None and running.step is not None:
                self.say(f"{running.job.label}: {running.step.name} is stopped; the same command continues it")
                running.process.terminate()
        until = time.monotonic() + GRACE
        while any(running.process is not None for running in self.running):
            if time.monotonic() > until:
                for running in self.running:
                    if running.process is not None and running.step is not None:
                        self.say(f"{running.job.label}: {running.step.name} does not end within {GRACE:.0f} s: killed")
                        running.process.kill()
                until = float("inf")
            self._collect()
            time.sleep(0.05)
        for running in list(self.running):
            if not running.job.left:
                self._finish(running)

    def _finish(self, running: Running) -> None:
        """Write the JSON file of a job, and delete models that no other job needs."""
        job = running.job
        self.running.remove(running)
        try:
            self._write(job)
        except (OSError, UserError) as error:  # the other jobs go on, and the models stay
            self.failed.append(job.label)
            self.say(f"{job.label}: failed: {error}")
            return
        self.say(f"{job.label}: wrote {job.file}")
        if not self.keep_models:
            self._delete_models(job)

    def _write(self, job: Job) -> None:
        """Write the JSON file of a job. Raises UserError if something that it measures is missing."""
        result: dict[str, Any] = {
            "kind": "study",
            **job.identity(self.place),
            "commit": self.commit,
            "date": time.strftime("%Y-%m-%d", time.gmtime()),
            "device": device_name(),
            "seconds": measure.seconds([step.marker for step in job.steps]),
        }
        write(job.file, result | job.measure())
        self.written = True

    def _delete_models(self, job: Job) -> None:
        others = [other for other in self.jobs if other is not job and not other.file.is_file()]
        needed = {step.folder for other in others for step in other.steps}
        for folder in {step.folder for step in job.steps} - needed:
            if (folder / "checkpoints").is_dir():
                shutil.rmtree(folder)
                self.say(f"{job.label}: its model {folder.name} is deleted")


def _memory(job: Job, gpu: Gpu) -> float:
    return job.gib + (job.share * gpu.gib if job.share else 0.0)


def _alone(job: Job) -> bool:
    """Whether all steps that are left need the GPU alone."""
    return bool(job.left) and all(step.alone for step in job.left)


def _mates(job: Job, waiting: Sequence[Job]) -> list[Job]:
    """Return the other waiting jobs that measure the model of `job`."""
    return [other for other in waiting if job.group and other.group == job.group and other is not job]


def _last(file: str) -> str:
    lines = Path(file).read_text(encoding="utf-8", errors="replace").strip().splitlines()
    return lines[-1] if lines else "it wrote nothing"


def device_name() -> str:
    """Return the name of the first GPU, or `CPU`."""
    query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    try:
        lines = subprocess.run(query, capture_output=True, text=True, check=True).stdout.splitlines()
    except (OSError, subprocess.CalledProcessError):
        lines = []
    return f"{len(lines)} × {lines[0].strip()}" if lines else "CPU"
