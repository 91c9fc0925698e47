"""Ends a process with the one that started it, also if that one is killed. Imports no torch."""

import os
import signal
from collections.abc import Callable

PR_SET_PDEATHSIG = 1  # linux/prctl.h
LAUNCHER = "SSSCALE_LAUNCHER"  # environment variable: id of the process that started a command, which ends with it


def end_with(launcher: int, number: signal.Signals) -> None:
    """Requests a signal for the moment when the process `launcher`, which has started this one, ends."""
    _request(launcher, number)()


def tied(number: signal.Signals) -> Callable[[], None]:
    """Returns the `preexec_fn` of a process that gets a signal when this one ends. For processes without threads only."""
    return _request(os.getpid(), number)


def _request(launcher: int, number: signal.Signals) -> Callable[[], None]:
    """Returns what requests the signal. It imports nothing, so that it can run between fork and exec."""
    import ctypes  # not above: what needs LAUNCHER only is imported before a command can handle Ctrl-C

    prctl = ctypes.CDLL(None).prctl

    def request() -> None:
        prctl(PR_SET_PDEATHSIG, number)
        if os.getppid() != launcher:  # it has ended before the request
            os.kill(os.getpid(), number)

    return request
