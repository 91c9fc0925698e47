"""Ctrl-C while a command still imports its modules: one line and exit code 130, as later (ssscale/interrupt.py)."""

import os
import signal
import sys
from types import FrameType
from typing import NoReturn

INTERRUPTED = 130  # as shells show SIGINT


def _leave(number: int, frame: FrameType | None) -> NoReturn:
    print("interrupted: the same command continues", file=sys.stderr, flush=True)
    os._exit(INTERRUPTED)


def leave_at_once_if_called() -> None:
    """Ends the process on Ctrl-C if Python imports this package for `python -m data_prep`."""
    if sys.argv[:1] != ["-m"]:  # which it is while Python looks for the module, whose name follows
        return
    ours = sys.orig_argv[sys.orig_argv.index("-m") + 1].split(".")[0] == __package__
    if ours and signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # else it is ignored, as after nohup
        signal.signal(signal.SIGINT, _leave)


def raise_again() -> None:
    """Lets Ctrl-C raise KeyboardInterrupt, as it does by default."""
    if signal.getsignal(signal.SIGINT) is _leave:
        signal.signal(signal.SIGINT, signal.default_int_handler)
