"""One case of the chaos test: a run and what belongs to it in a folder of its own, and what came of a command there."""

import os
import random
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from ssscale.train.checkpoint_folder import list_checkpoints, verify
from ssscale.train.records import read_metrics
from tests.chaos.damage import snapshot
from tests.train.commands import run_command
from tests.train.ranks import Ranks

ROOT = Path(__file__).resolve().parents[2]
HANG_S = 60.0  # a command that takes longer counts as hanging
BEGUN, END = 6, 8  # steps of the run that is damaged, and of the run that it has to become
LONG = 60  # steps of the runs that something happens to while they train
EVERY = ["data.num_workers=0", "train.save_every=2", "train.keep=2"]
LONG_KEYS = ["data.num_workers=0", "train.save_every=5", "train.keep=2", f"train.max_steps={LONG}"]


class WrongOutcomeError(AssertionError):
    """A case did not come out as its kind had declared."""


def demand(good: object, complaint: str) -> None:
    if not good:
        raise WrongOutcomeError(complaint)


@dataclass(frozen=True)
class World:
    """What all cases copy from: runs that nothing happened to. Made once."""

    folder: Path
    data: Path

    @classmethod
    def make(cls, folder: Path, data: Path) -> "World":
        world = cls(folder, data)
        for name, keys in (
            ("begun", [*EVERY, f"train.max_steps={BEGUN}"]),
            ("plain", [*EVERY, f"train.max_steps={END}"]),
            ("long", LONG_KEYS),
        ):
            Ranks([f"data.path={data}", *keys], folder / name, size=1).finish()
        for step in (BEGUN - 2, BEGUN):
            given = [f"checkpoint={folder}/begun/checkpoints/step-{step:08d}", f"out={folder}/exported-{step}"]
            code, output = run_command("launch.export", given, folder / "export.log")
            assert code == 0, output
        return world


@dataclass
class Scene:
    """run: a copy of a run of 6 steps with checkpoints of steps 4 and 6; a kind damages it, its data or another file.

    resumes: the steps from which the command may go on. names: what the sentence of a refusal must hold. harmed: said of a
    failure. canary: a file beside the run that nobody may touch.
    """

    world: World
    folder: Path
    rng: random.Random
    arguments: list[str] = field(default_factory=list)
    plant: Callable[[], None] | None = None
    resumes: tuple[int, ...] = (BEGUN,)
    names: str = ""
    harmed: str = ""
    output: str = ""

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True)
        self.run = self.folder / "run"
        self.data = self.world.data
        shutil.copytree(self.world.folder / "begun", self.run, symlinks=True)
        (self.folder / "cwd").mkdir()
        (self.folder / "outside").mkdir()
        (self.folder / "outside/canary").write_text("not yours")

    @property
    def checkpoints(self) -> Path:
        return self.run / "checkpoints"

    @property
    def newest(self) -> Path:
        return self.checkpoints / f"step-{BEGUN:08d}"

    @property
    def older(self) -> Path:
        return self.checkpoints / f"step-{BEGUN - 2:08d}"

    def own_data(self) -> Path:
        """A copy of the data that may be damaged, as data_prep leaves it: shards are not decompressed yet."""
        self.data = self.folder / "data"
        shutil.copytree(self.world.data, self.data, ignore=shutil.ignore_patterns("*.mds", "*.lock"))
        return self.data

    def train(self, *keys: str) -> Ranks:
        given = [*(keys or (*EVERY, f"train.max_steps={END}")), f"data.path={self.data}", *self.arguments]
        return Ranks(given, self.run, size=1, plant=Start(self.folder / "cwd", self.plant), log=self.folder / "log")


@dataclass(frozen=True)
class Start:
    """To plant: the process begins in a folder of its own, where nothing may be left."""

    cwd: Path
    more: Callable[[], None] | None

    def __call__(self) -> None:
        os.chdir(self.cwd)
        if self.more is not None:
            self.more()


# ---- what a right outcome is


def check_output(code: int | None, output: str) -> None:
    """Nothing ends in a traceback, a hang, or an unexpected error."""
    demand(code is not None, f"it hangs:\n{output}")
    demand(code in (0, 2, 75), f"exit code {code}:\n{output}")
    demand("Traceback" not in output, f"a traceback:\n{output}")


def check_refusal(scene: Scene, output: str, before: dict[str, bytes | str], kept: str = "") -> None:
    """One sentence, and what begins with `kept` in the run's folder is as it was."""
    errors = [line for line in output.splitlines() if line.startswith("error: ")]
    demand(len(errors) == 1 and output.splitlines()[-1] == errors[0], f"not one sentence at the end:\n{output}")
    demand(scene.names in errors[0], f"the sentence does not name {scene.names!r}:\n{errors[0]}")
    after = snapshot(scene.run)
    changed = [name for name in before.keys() | after.keys() if before.get(name) != after.get(name)]
    demand(not [name for name in changed if name.startswith(kept)], f"the refusal changed {changed}:\n{output}")


def check_outside(scene: Scene) -> None:
    demand(not list((scene.folder / "cwd").iterdir()), "something was written where the command was started")
    canary = {"canary": b"not yours"}
    demand(snapshot(scene.folder / "outside") == canary, "something was written outside the run's folders")


def weights_of(checkpoint: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in checkpoint.glob("*.safetensors")}


def losses(run: Path) -> dict[int, float]:
    found = [record for record in read_metrics(run / "metrics.jsonl") if "loss" in record]
    demand(len({record["step"] for record in found}) == len(found), "a step stands in metrics.jsonl twice")
    return {record["step"]: record["loss"] for record in found}


def check_identical(run: Path, plain: Path, since: int, earlier: bool = True) -> None:
    """Losses after the step, and weights and moments at the end, to the last bit; with `earlier`, what is left of earlier
    steps is right, too.
    """
    ours, theirs = losses(run), losses(plain)
    wanted = {step: loss for step, loss in theirs.items() if step > since}
    demand({step: loss for step, loss in ours.items() if step > since} == wanted, f"other losses: {ours}, not {theirs}")
    if earlier:
        demand(ours.items() <= theirs.items(), "losses of earlier steps have changed")
    newest, other = (list_checkpoints(folder / "checkpoints")[-1] for folder in (run, plain))
    demand(newest.name == other.name, f"it ended with {newest.name}, not {other.name}")
    demand(weights_of(newest) == weights_of(other), "other weights or moments")
    demand(verify(newest) is None, f"the last checkpoint is not whole: {verify(newest)}")


def resumed_from(output: str) -> int:
    found = re.findall(r"resumed from .*\(step (\d+)\)", output)
    demand(found, f"it began again:\n{output}")
    return int(found[-1])


def leaves(tree: object, path: str = "") -> dict[str, object]:
    """A YAML tree as dotted key → value."""
    if isinstance(tree, dict):
        entries = [leaves(value, f"{path}.{key}") for key, value in tree.items()]
        return {key: value for entry in entries for key, value in entry.items()}
    return {path.removeprefix("."): tree}


def saved_tree(run: Path) -> dict[str, object]:
    return leaves(yaml.safe_load((run / "config.yaml").read_text()))
