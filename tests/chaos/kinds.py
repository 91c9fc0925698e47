"""The kinds of damage. Each declares the right outcome before it is tried.

A kind is a function that damages a `Scene`. `KINDS` holds all of them by name, and docs/faults.md is made of it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from tests.chaos.damage import snapshot
from tests.chaos.scene import (
    HANG_S,
    Scene,
    World,
    check_identical,
    check_output,
    check_outside,
    check_refusal,
    demand,
    resumed_from,
)


class Outcome(Enum):
    """first: the exit codes that the command may end with. In cases that continue, the same command then has to end with 0.

    code, identical: the columns "exit code" and "same bits" of docs/faults.md.
    """

    GOES_ON = ((0,), "0", "yes")
    REFUSES = ((2,), "2", "nothing is changed")
    GOES_ON_OR_SAVES = ((0, 2), "0; or 2 if the run reads the damaged part", "yes; after code 2, no step is lost")
    USES_OR_REFUSES = ((0, 2), "0; or 2 if the command finds the damage", "after code 2, nothing is changed")
    TAKES_THE_OLDER = ((0,), "0", "")
    GOES_ON_OR_CONTINUES = ((0, 2), "0; or 2, then 0", "yes")
    SAVES_AND_CONTINUES = ((0, 75), "75, then 0; 0 if the run has ended before the signal", "yes")
    ONE_OF_TWO = ((0, 2), "0 for the run that trains; 2 for the other one, or 0 if the first has ended", "yes")

    def __init__(self, first: tuple[int, ...], code: str, identical: str) -> None:
        self.first, self.code, self.identical = first, code, identical


@dataclass(frozen=True)
class Kind:
    """fault, seen: what happens and what the user sees, as docs/faults.md says it. area: the heading there.

    act: runs the command after the damage and judges what came of it.
    """

    name: str
    area: str
    fault: str
    seen: str
    outcome: Outcome
    harm: Callable[[Scene], None]
    act: Callable[["Kind", Scene], None]

    def try_once(self, scene: Scene) -> None:
        """Raises WrongOutcomeError with what came out differently."""
        self.harm(scene)
        self.act(self, scene)
        check_outside(scene)


KINDS: dict[str, Kind] = {}


def kind(
    area: str, fault: str, outcome: Outcome, seen: str, act: Callable[[Kind, Scene], None] | None = None
) -> Callable[[Callable[[Scene], None]], Callable[[Scene], None]]:
    def register(harm: Callable[[Scene], None]) -> Callable[[Scene], None]:
        name = getattr(harm, "__name__", "").replace("_", "-")
        add(Kind(name, area, fault, seen, outcome, harm, act or resume))
        return harm

    return register


def add(new: Kind) -> None:
    assert new.name not in KINDS, new.name
    KINDS[new.name] = new


def resume(kind: Kind, scene: Scene) -> None:
    """Start the run again, to two more steps."""
    before, data = snapshot(scene.run), snapshot(scene.world.data)
    ranks = scene.train()
    code = ranks.wait(HANG_S)[0]
    scene.output = ranks.output()
    judge(kind, scene, code, before)
    kept = {name: content for name, content in snapshot(scene.world.data).items() if name in data}
    demand(kept == data, "the data was changed")


def demand_code(kind: Kind, code: int | None, output: str) -> None:
    demand(code in kind.outcome.first, f"exit code {code}, not {kind.outcome.first}:\n{output}")


def judge(kind: Kind, scene: Scene, code: int | None, before: dict[str, bytes | str]) -> None:
    check_output(code, scene.output)
    demand_code(kind, code, scene.output)
    if code == 2:
        # What is wrong with data may be met by the first step, when the start is on record: nothing trained is lost.
        started = kind.area == "The data folder"
        kept = "checkpoints/" if started else ""
        if kind.outcome is Outcome.GOES_ON_OR_SAVES:  # the last step may be saved beside those before it
            kept = max(name.rpartition("/")[0] for name in before if name.startswith("checkpoints/step-")) + "/"
        check_refusal(scene, scene.output, before, kept)
        return
    since = resumed_from(scene.output)
    demand(since in scene.resumes, f"it went on from step {since}, not {scene.resumes}:\n{scene.output}")
    check_identical(scene.run, scene.world.folder / "plain", since, earlier=kind.area != "metrics.jsonl")


def folder_of(world: World, kind: str, number: int) -> Path:
    return world.folder / "cases" / f"{kind}-{number:04d}"
