"""Ends a process with the one that started it, also if that one is killed. Imports no torch."""

import os
import signal
from collections.abc import Callable

PR_SET_PDEATHSIG = 1  # linux/prctl.h
LAUNCHER = "SSSCALE_LAUNCHER"  # environment variable: id of the process that started a command, which ends with it


def end_with(launcher: int, number: signal.Signals) -> None:
    """Requests a signal for the moment when the process `launcher`, which has started this one, ends."""
    import ctypes  # not above: what needs LAUNCHER only is imported before a command can handle Ctrl-C

    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number)
    if os.getppid() != launcher:  # it has ended before the request
        os.kill(os.getpid(), number)


def tied(number: signal.Signals) -> Callable[[], None]:
    """Returns the `preexec_fn` of a process that gets a signal when this one ends. For processes without threads only."""
    import ctypes  # noqa: F401 - not for the first time between fork and exec

    launcher = os.getpid()
    return lambda: end_with(launcher, number)
