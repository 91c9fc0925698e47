"""Fixtures of the training tests."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small data folder in tiny_sb's form, from this repository's own texts."""
    folder = tmp_path_factory.mktemp("corpus")
    sources = []
    for source, pattern in (("code", "ssscale/**/*.py"), ("docs", "docs/*.md")):
        # Held out by place, not by what a text says: editing a document must not empty a split.
        for number, path in enumerate(sorted(ROOT.glob(pattern))):
            place = folder / (f"{source}-valid" if number % 5 == 0 else source)
            place.mkdir(exist_ok=True)
            (place / f"{path.stem}_{path.parent.name}.txt").write_text(path.read_text())
        sources += [f"--source={source}={folder / source}", f"--source={source}={folder / f'{source}-valid'}:valid"]
    options = ["--train-vocab-size=1024", "--length=256", "--valid-fraction=0"]
    command = [sys.executable, "-m", "data_prep", "pack", "--out", str(folder / "data"), *options, *sources]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    return folder / "data"
