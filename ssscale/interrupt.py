"""Ctrl-C: one line and exit code 130, also while a command still imports its modules. Imports no torch.

In that time a KeyboardInterrupt would print a traceback, or vanish in a library that catches it. So a command calls
`leave_at_once` before its other imports, and `raise_again` as soon as something handles the exception.
"""

import os
import signal
import sys
from types import FrameType
from typing import NoReturn

from ssscale.errors import INTERRUPTED
from ssscale.launcher import LAUNCHER


def report() -> None:
    """Prints the line, unless this process is one of several: then the main rank or the launcher does."""
    rank = os.environ.get("RANK")
    if rank == "0" or (rank is None and LAUNCHER not in os.environ):
        print("interrupted", file=sys.stderr, flush=True)


def _leave(number: int, frame: FrameType | None) -> NoReturn:
    report()
    os._exit(INTERRUPTED)


def leave_at_once() -> None:
    """Ends the process on Ctrl-C."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # else it is ignored, as after nohup
        signal.signal(signal.SIGINT, _leave)


def leave_at_once_if_called(package: str) -> None:
    """For the __init__ of a package with commands: the same if Python imports it for `python -m PACKAGE.MODULE`."""
    if sys.argv[:1] != ["-m"]:  # which it is while Python looks for the module, whose name follows
        return
    if sys.orig_argv[sys.orig_argv.index("-m") + 1].split(".")[0] == package:
        leave_at_once()


def raise_again() -> None:
    """Lets Ctrl-C raise KeyboardInterrupt, as it does by default."""
    if signal.getsignal(signal.SIGINT) is _leave:
        signal.signal(signal.SIGINT, signal.default_int_handler)
