"""Trying one case: by its kind's name, its number and a seed, which say all that is random in it."""

import random
import shutil
import subprocess
import sys
from pathlib import Path

import tests.chaos.of_a_run
import tests.chaos.of_files
import tests.chaos.of_the_machine  # noqa: F401 - kinds register themselves
from tests.chaos.kinds import KINDS, folder_of
from tests.chaos.scene import ROOT, Scene, World, WrongOutcomeError

__all__ = ["KINDS", "attempt", "make_world"]


def make_world(folder: Path) -> World:
    """A small data folder from this repository's own texts, and the runs on it."""
    sources = [f"--source=code={ROOT / 'ssscale'}/**/*.py", f"--source=docs={ROOT / 'docs'}/**/*.md"]
    pack(folder / "data", "--train-vocab-size=1024", *sources)
    tokenizer = f"--tokenizer={folder / 'data/tokenizer.json'}"
    pack(folder / "data-shuffled", tokenizer, *sources, "--seed=1")
    pack(folder / "data-less", tokenizer, sources[0].replace("**/", "m*/"), sources[1])
    folder.chmod(0o755)  # for cases that run as another user
    return World.make(folder, folder / "data")


def pack(out: Path, *options: str) -> None:
    command = [sys.executable, "-m", "data_prep", "pack", "--out", str(out), "--length=256", "--valid-fraction=0.05"]
    subprocess.run([*command, *options], cwd=ROOT, check=True, capture_output=True)


def attempt(world: World, name: str, number: int, seed: int) -> str:
    """What came out differently, nothing where all is right. A case that failed leaves its folder."""
    folder = folder_of(world, name, number)
    scene = Scene(world, folder, random.Random(f"{seed}/{name}/{number}"))
    try:
        KINDS[name].try_once(scene)
    except WrongOutcomeError as wrong:
        return f"{scene.harmed}: {wrong}"
    except Exception as error:  # of the test itself, which says nothing about the run
        raise RuntimeError(f"{name}:{number} with seed {seed}: {scene.harmed}") from error
    shutil.rmtree(folder, ignore_errors=True)
    return ""
