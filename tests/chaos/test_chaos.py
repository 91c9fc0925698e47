"""The chaos test's short form: one case of some kinds, one of each area at least; and that it can fail.

The cases are always the same, so that a change never fails here for what it did not touch. `make test-chaos` tries more.
"""

import dataclasses
import os
from pathlib import Path

import pytest

from tests.chaos import kinds
from tests.chaos.attempt import KINDS, attempt
from tests.chaos.scene import World, WrongOutcomeError, check_identical, check_output
from tests.chaos.table import FILE, text

# One of each area, the quickest; `make test-chaos` has all.
SHORT = [
    "checkpoint-a-bit-is-flipped",
    "several-files",
    "every-checkpoint",
    "metrics",
    "run-config",
    "broken-lock",
    "shard",
]
SHORT += ["run-file", "export-file", "export-of-damaged", "read-only-disk", "clock-jumps", "signals"]


@pytest.fixture(scope="module")
def world(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> World:
    return World.make(tmp_path_factory.mktemp("chaos"), corpus)


def test_the_short_form_has_every_area() -> None:
    assert {KINDS[name].area for name in SHORT} == {kind.area for kind in KINDS.values()}


@pytest.mark.parametrize("name", SHORT)
def test_damage_comes_out_as_declared(name: str, world: World) -> None:
    if os.geteuid() != 0 and name == "read-only-disk":
        pytest.skip("only root can mount")
    assert attempt(world, name, 0, seed=0) == "", f"python -m tests.chaos --only {name}:0"


def test_a_wrong_outcome_is_seen(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kind that declares the opposite of what is right fails; so does a result that differs in one bit."""
    wrong = kinds.Outcome.REFUSES
    monkeypatch.setitem(KINDS, "wrong", dataclasses.replace(KINDS["newest-is-gone"], name="wrong", outcome=wrong))
    assert "exit code 0, not (2,)" in attempt(world, "wrong", 0, seed=0)
    with pytest.raises(WrongOutcomeError, match="other losses"):
        check_identical(world.folder / "begun", world.folder / "plain", 0)
    for code, output in ((70, ""), (0, "Traceback (most recent call last)"), (None, "")):
        with pytest.raises(WrongOutcomeError):
            check_output(code, output)


def test_the_page_of_faults_is_what_the_tests_promise() -> None:
    assert FILE.read_text() == text(), "python -m tests.chaos.table makes it again"
