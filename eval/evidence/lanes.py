"""Runs jobs on the GPUs of one machine: the first in the list first, each as soon as there is room for it."""

import json
import os
import shlex
import signal
import subprocess
import sys
import tarfile
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from eval.evidence.jobs import ROOT, Job
from eval.evidence.schedule import Place, next_place
from ssscale.errors import SAVED
from ssscale.launcher import tied

LARGEST = 4 * 2**20  # bytes of a file that is packed
KEPT = {".json", ".jsonl", ".png", ".txt", ".log", ".yaml", ".md", ".csv"}
GRACE = 20.0  # seconds between SIGTERM and SIGKILL
# bash handles a signal while it waits for a command in the background, and not while it runs one itself.
SCRIPT = """trap 'trap - TERM; kill -TERM 0' TERM
(
set -euo pipefail
{commands}
) & wait $!
"""


@dataclass
class Running:
    place: Place
    process: subprocess.Popen[bytes]
    began: float = field(default_factory=time.monotonic)


@dataclass
class Lanes:
    """Runs jobs until all have ended, or until `seconds` have passed.

    gpus: GiB of memory by name for CUDA_VISIBLE_DEVICES. text, out: folders. out/JOB has a job's files, out/work what
    jobs share, out/state.json what has ended, and out/evidence.tar.gz the small files of all jobs, to be taken home.
    """

    jobs: list[Job]
    gpus: dict[str, float]
    text: Path
    out: Path
    seconds: float = float("inf")
    ended: dict[str, dict[str, float]] = field(default_factory=dict)
    running: list[Running] = field(default_factory=list)
    began: float = field(default_factory=time.monotonic)
    stopped: bool = False

    def run(self) -> int:
        """Returns 0 if all jobs ended well, 1 if one failed, 75 if some are left. Jobs that ended well are not repeated."""
        self.out.mkdir(parents=True, exist_ok=True)
        if (self.out / "state.json").is_file():
            before = json.loads((self.out / "state.json").read_text(encoding="utf-8"))
            self.ended = {name: found for name, found in before.items() if found["code"] == 0}
        handlers = {number: signal.signal(number, self._stop) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            while not self.stopped and (self._start() or self.running):
                time.sleep(0.1)
                self._collect()
                self.stopped = self.stopped or self.passed > self.seconds
            self._end()
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)
        left = [job.name for job in self.jobs if job.name not in self.ended]
        if left:
            self.say(f"left: {' '.join(left)}")
        return 1 if any(found["code"] for found in self.ended.values()) else SAVED if left else 0

    @property
    def passed(self) -> float:
        return time.monotonic() - self.began

    def say(self, text: str) -> None:
        print(f"{self.passed:6.0f} s  {text}", flush=True)

    def _stop(self, number: int, frame: FrameType | None) -> None:
        self.stopped = True

    def _start(self) -> bool:
        """Starts what there is room for. Returns whether a job was started."""
        started = False
        ended = {name: found["code"] == 0 for name, found in self.ended.items()}
        while place := next_place(
            self.jobs, self.gpus, [running.place for running in self.running], ended, self.seconds - self.passed
        ):
            self._launch(place)
            started = True
        return started

    def _launch(self, place: Place) -> None:
        job = place.job
        here, work = self.out / job.name, self.out / "work"
        for folder in (here, work):
            folder.mkdir(parents=True, exist_ok=True)
        names = {"TEXT": self.text, "HERE": here, "WORK": work}
        environment = os.environ | {name: str(path.resolve()) for name, path in names.items()}
        environment["PATH"] = f"{Path(sys.executable).parent}:{environment['PATH']}"  # `python` is this one
        if place.gpus:
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(place.gpus)
        script = SCRIPT.format(commands="\n".join(job.commands))
        with (here / "job.log").open("ab") as log:
            process = subprocess.Popen(
                ["bash", "-c", script],
                cwd=ROOT,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=tied(signal.SIGTERM),
            )
        self.running.append(Running(place, process))
        self.say(str(place))

    def _collect(self) -> None:
        """Takes note of jobs that have ended."""
        for running in list(self.running):
            code = running.process.poll()
            if code is None:
                continue
            self.running.remove(running)
            seconds = round(time.monotonic() - running.began, 1)
            name = running.place.job.name
            self.ended[name] = {"code": code, "seconds": seconds}
            log = self.out / name / "job.log"
            self.say(f"{name} ended with code {code} after {seconds:.0f} s" + (f", see {log}" if code else ""))
            (self.out / "state.json").write_text(json.dumps(self.ended, indent=1), encoding="utf-8")
            self._pack()

    def _pack(self) -> None:
        """Packs the small files of all jobs, in one rename."""
        partial = self.out / "evidence.tar.gz.partial"
        with tarfile.open(partial, "w:gz") as archive:
            for file in sorted(self.out.rglob("*")):
                inside = file.relative_to(self.out)
                skipped = {"work", "checkpoints", "tensorboard"} & set(inside.parts)
                if file.is_file() and file.suffix in KEPT and not skipped and file.stat().st_size <= LARGEST:
                    archive.add(file, str(inside))
        partial.replace(self.out / "evidence.tar.gz")

    def _end(self) -> None:
        """Ends what runs: SIGTERM first, and SIGKILL for what does not end."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            until = time.monotonic() + GRACE
            for running in self.running:
                with suppress(ProcessLookupError):
                    os.killpg(running.process.pid, number)
            while time.monotonic() < until and any(running.process.poll() is None for running in self.running):
                time.sleep(0.1)
        for running in self.running:
            self.say(f"{running.place.job.name} was stopped")
        self.running.clear()


def shown(job: Job) -> str:
    """Returns what a job does, as lines of text."""
    where = "CPU" if not job.gpus else f"{job.gpus} GPU{'s' if job.gpus > 1 else ''}"
    how = "" if not job.gpus else " alone" if job.gib is None else f", {job.gib:.0f} GiB, shared"
    after = f", after {shlex.join(job.after)}" if job.after else ""
    head = f"# {job.name}: {job.page}; {job.minutes:.1f} minutes, {where}{how}{after}"
    return "\n".join([head, *job.commands])
