"""Ends a process with the one that started it, also if that one is killed, and tells it the exit code. Imports no torch."""

import os
import signal
from collections.abc import Callable
from contextlib import suppress

PR_SET_PDEATHSIG = 1  # linux/prctl.h
LAUNCHER = "SSSCALE_LAUNCHER"  # environment variable: id of the process that started a command, which ends with it
EXIT_CODES = "SSSCALE_EXIT_CODES"  # environment variable with the name of a file that collects the exit codes of ranks


def note_code(code: int) -> None:
    """Appends an exit code to the file of EXIT_CODES, which slurm/pretrain.sbatch or launch/workers.py reads.

    srun itself only returns the code of ranks that it has killed. A file that cannot be written does not change the code.
    """
    file = os.environ.get(EXIT_CODES)
    if file:
        with suppress(OSError), open(file, "a") as opened:
            opened.write(f"{code}\n")


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
