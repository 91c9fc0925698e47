"""Commands of ours in processes that are forked from one that has everything imported."""

import os
import runpy
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.train.forked import ForkedProcess


def let_others_in(*folders: Path) -> None:
    """For nobody to come into these folders of pytest's: all between them and the system's temporary folder."""
    system = Path(tempfile.gettempdir())
    for folder in folders:
        for path in (folder, *folder.parents):
            if system in path.parents:
                path.chmod(0o755)


def _command(module: str, arguments: list[str], log: str, plant: Callable[[], None] | None) -> None:
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    sys.argv = [module, *arguments]
    if plant is not None:
        plant()
    runpy.run_module(module, run_name="__main__")


def start_command(module: str, arguments: list[str], log: Path, plant: Callable[[], None] | None = None) -> Any:
    """The process of a module that is run as a script. plant: called in it first, to break something there."""
    log.touch(0o666)
    log.chmod(0o666)
    process = ForkedProcess(target=_command, args=(module, arguments, str(log), plant))
    process.start()
    return process


def run_command(
    module: str, arguments: list[str], log: Path, plant: Callable[[], None] | None = None
) -> tuple[int | None, str]:
    """The exit code (None: it did not end in 100 s) and the output of a command in a process of its own."""
    process = start_command(module, arguments, log, plant)
    process.join(100)
    code = process.exitcode
    if code is None:
        process.kill()
    return code, log.read_text(errors="replace")
