"""Runs of the commands with a mixer that one file of the tests adds."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PLUGIN = Path(__file__).with_name("retnet.py")
Command = Callable[..., str]


@pytest.fixture(scope="session")
def command() -> Command:
    return commands(PLUGIN)


def commands(plugin: Path) -> Command:
    """python FILE ARGUMENTS with a plugin; its output. Fails where the exit code is another than expected."""

    def run(file: str, *arguments: str, code: int = 0) -> str:
        environment = os.environ | {"SSSCALE_PLUGINS": str(plugin), "PYTHONPATH": str(ROOT)}
        done = subprocess.run(
            [sys.executable, file, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120
        )
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout + done.stderr

    return run
