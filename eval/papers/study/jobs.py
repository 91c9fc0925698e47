"""What a study consists of: jobs, each a sequence of commands after which one small JSON file is written."""

import json
import math
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ssscale.errors import UserError
from ssscale.json_object import read_json

TRAIN_GIB = 25.0  # of a microbatch of 65,536 tokens at 50m, with CUDA's context (23.9 measured). Tests take less.
AGAIN = 0.5  # minutes to start, to load and to compile once more
WIDE_GIB = 34.0  # the same at 162m, and at 50m with twice the width


@dataclass(frozen=True)
class Step:
    """One command of a job, without the interpreter.

    minutes: alone on one H200, the start included.
    folder: where the marker of the finished step lies. Steps of several jobs with the same marker run once.
    codes: exit codes with which the step has ended well.
    alone: whether nothing else may run on its GPU meanwhile, because its time is a result.
    trains: whether it is a training that keeps its GPU busy. Only two of them share a GPU.
    """

    name: str
    command: tuple[str, ...]
    minutes: float
    folder: Path
    codes: tuple[int, ...] = (0,)
    alone: bool = False
    trains: bool = False

    @property
    def marker(self) -> Path:
        return self.folder / f"{self.name}.done"

    @property
    def done(self) -> bool:
        return self.marker.is_file()

    @property
    def paused(self) -> Path:
        """The file that says how far the step was when it was stopped."""
        return self.folder / f"{self.name}.paused"

    @property
    def before(self) -> dict[str, float]:
        """The seconds that earlier calls took, and the minutes of work alone on a GPU that they did."""
        return dict(read_json(self.paused)) if self.paused.is_file() else {"seconds": 0.0, "work": 0.0}

    @property
    def left(self) -> float:
        """Minutes alone on a GPU that are left. A step that continues starts once more."""
        work = self.before["work"]
        return self.minutes if not work else max(0.0, self.minutes - work) + AGAIN


@dataclass(frozen=True)
class Place:
    """Folders and files of a study. text: made by eval.papers.study.split. work: models and logs. out: the JSON files."""

    text: Path
    work: Path
    out: Path
    questions: tuple[Path, ...] = ()
    wikitext: Path | None = None
    eval_data: Path | None = None

    @property
    def test(self) -> Path:
        """The test documents. Raises UserError unless there is exactly one file of them."""
        found = sorted(self.text.glob("test.*.jsonl.zst"))
        if len(found) != 1:
            raise UserError(
                f"--text={self.text} must have one test.NAME.jsonl.zst: make it with eval.papers.study.split"
            )
        return found[0]

    def plain(self, command: Sequence[str]) -> str:
        """Return a command without the folders of this machine, as it is recorded. The files may share a folder."""
        names = [(self.text, "TEXT"), (self.work, "WORK"), (self.out, "OUT")]
        names += [(file, f"QUESTIONS/{file.name}") for file in self.questions]
        names += [(self.wikitext, f"WIKITEXT/{self.wikitext.name}")] if self.wikitext else []
        names += [(self.eval_data, "EVAL")] if self.eval_data else []
        line = shlex.join(["python", *command])
        for path, name in sorted(names, key=lambda pair: -len(str(pair[0]))):
            line = line.replace(str(path), name)
        return line


@dataclass(frozen=True)
class Job:
    """Trains, measures and writes `file`.

    reads_test: whether a step reads test documents, which needs a chosen learning rate.
    measure: returns the content of the JSON file besides what every job records.
    gib, share: the memory it takes, in GiB and in addition as a share of the GPU's.
    method: whose learning rate the job tries or has.
    group: of jobs that measure one model, which is deleted after the last of them. They start in one stay.
    after: results from which it follows whether the job is needed. It waits for those that the same call makes.
    """

    study: str
    name: str
    seed: int
    steps: tuple[Step, ...]
    gib: float
    file: Path
    measure: Callable[[], dict[str, Any]] = field(compare=False)
    rate: float | None = None
    reads_test: bool = False
    group: str | None = None
    share: float = 0.0
    method: str | None = None
    after: tuple[Path, ...] = ()

    @property
    def label(self) -> str:
        return f"{self.study}/{self.name}-s{self.seed}"

    @property
    def names(self) -> list[str]:
        """The names by which it can be selected."""
        short = [self.name, f"{self.name}-s{self.seed}"]
        return short + [f"{self.study}/{name}" for name in short]

    @property
    def has_rate(self) -> bool:
        """Whether its learning rate has been chosen, or it needs none."""
        return self.rate is None or not math.isnan(self.rate)

    @property
    def left(self) -> list[Step]:
        """The steps that have not ended yet."""
        return [step for step in self.steps if not step.done]

    @property
    def minutes(self) -> float:
        """Minutes alone on a GPU that the remaining steps take."""
        return sum(step.left for step in self.left)

    @property
    def begun(self) -> bool:
        """Whether one of its steps was stopped, or its model is there and nowhere else."""
        return any(step.paused.is_file() for step in self.left) or any(step.alone and step.done for step in self.steps)

    def identity(self, place: Place) -> dict[str, Any]:
        """What a JSON file must share with the job that would make it."""
        commands = [place.plain(step.command) for step in self.steps]
        return {
            "study": self.study,
            "job": self.name,
            "seed": self.seed,
            "rate": self.rate,
            "text": text_key(place.text) if any("TEXT/" in command for command in commands) else None,
            "commands": commands,
        }

    def has_result(self, place: Place) -> bool:
        """Return whether the JSON file exists. Raises UserError if other commands made it."""
        if not self.file.is_file():
            return False
        before = read_json(self.file)
        identity = json.loads(json.dumps(self.identity(place)))
        other = [key for key, value in identity.items() if before.get(key) != value]
        if other:
            raise UserError(f"{self.file} was made with other {', '.join(other)}: remove it, or choose another --out")
        return True


def text_key(text: Path) -> str | None:
    """Return the SHA-256 of the split, or None if there is none."""
    file = text / "split.json"
    return str(read_json(file)["sha256"]) if file.is_file() else None
