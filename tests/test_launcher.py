"""A process that asked to end with the one that started it."""

import subprocess
import sys
import time

import psutil
import pytest

CHILD = """
import signal, sys, time
from contextlib import suppress
from ssscale.launcher import end_with
time.sleep({wait})
end_with(int(sys.argv[1]), signal.SIGTERM)
with suppress(BrokenPipeError):
    print("tied", flush=True)
time.sleep(60)
"""
PARENT = """
import os, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", sys.argv[1], str(os.getpid())])
print(child.pid, flush=True)
child.wait()
"""


@pytest.mark.parametrize("late", [False, True])
def test_it_ends_with_its_launcher(late: bool) -> None:
    """late: the launcher has ended before the process asks."""
    command = [sys.executable, "-c", PARENT, CHILD.format(wait=2 if late else 0)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as launcher:
        assert launcher.stdout is not None
        process = psutil.Process(int(launcher.stdout.readline()))
        if not late:
            assert launcher.stdout.readline() == "tied\n"
            time.sleep(0.2)
        assert process.is_running()
        launcher.kill()
    process.wait(20)
