"""Start and end of the commands in launch/ and slurm/: ranks, logging and exit codes.

A command declares its options once, as a `Command`, and ends with `run(COMMAND, main)`. Neither this module nor the
top-level imports of a command import torch, so that --help and error messages come without delay.
"""

import logging
import os
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from launch.process import WORKER, rank_environment
from ssscale.errors import FAILED, INTERRUPTED, OUT_OF_MEMORY, TOGETHER, UNREAD, Stop, UserError
from ssscale.interrupt import raise_again, report
from ssscale.launcher import note_code
from ssscale.options import EVERY_KEY, Command, Option
from ssscale.unforeseen import describe, describe_os_error, output_unread, prepare_output

__all__ = [
    "EVERY_KEY",
    "ROOT",
    "Command",
    "Option",
    "join_ranks",
    "leave",
    "log",
    "rank",
    "run",
    "world_size",
]

ROOT = Path(__file__).resolve().parents[1]
# Codes of a rank that fails by itself, while others may wait for it in a collective. launch/workers.py then kills the
# others first.
ALONE = (2, FAILED, OUT_OF_MEMORY)


def join_ranks() -> None:
    """Sets the rank variables of a task that srun has started. Other launchers have set them already."""
    os.environ |= rank_environment(os.environ)


def rank() -> int:
    return int(os.environ.get("RANK", "0"))


def world_size() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def log(level: int = logging.INFO, force: bool = True) -> None:
    """Sets up logging.

    The main rank shows our messages from `level` on, and warnings and errors of libraries. The other ranks show only
    errors.
    force: replace handlers that an imported library has installed.
    """
    main = rank() == 0
    logging.basicConfig(level=logging.WARNING if main else logging.ERROR, format="%(message)s", force=force)
    for name in ("ssscale", "ssscale_kernels"):
        logging.getLogger(name).setLevel(level if main else logging.ERROR)


def run(command: Command, main: Callable[[list[str]], None]) -> NoReturn:
    """Calls main(argv) and exits. --help prints the options.

    The exit code is 0, 2 after a UserError, the code of a Stop, 130 after Ctrl-C, or that of `end_of`. A training run
    handles Ctrl-C itself: it saves and ends with 75. Errors print one sentence to stderr. It names the rank after an
    unexpected error, and after a UserError of a rank other than the main one that has not joined the others.
    """
    argv = sys.argv[1:]
    prepare_output()
    try:
        raise_again()
        command.help_if_asked(argv)
        main(argv)
        sys.stdout.flush()
    except UserError as error:
        if rank():
            # Usually all ranks find the same mistake. The main rank reports it, and the launcher ends the others in the
            # meantime. A mistake that only this rank has found is still reported.
            time.sleep(5)
        # After the ranks have joined, a sentence names its rank where that matters.
        print(f"error: {'' if _joined() or rank() == 0 else _place()}{error}", file=sys.stderr, flush=True)
        leave(2)
    except Stop as stop:
        alone = stop.code not in TOGETHER
        if alone or rank() == 0:
            print(f"stopped: {stop}", file=sys.stderr, flush=True)
        leave(stop.code)
    except KeyboardInterrupt:
        report()
        leave(INTERRUPTED)
    except Exception as error:
        leave(end_of(error))
    sys.exit(0)


def end_of(error: Exception) -> int:
    """Prints one sentence about an unexpected error, if anybody reads what it prints, and returns the exit code."""
    if output_unread(error):
        return UNREAD
    refused = describe_os_error(error) if isinstance(error, OSError) else None
    if refused is not None:
        print(f"error: {_place()}{refused}", file=sys.stderr, flush=True)
        return 2
    print(f"failed: {_place()}{describe(error, Path(sys.argv[0]).stem or 'python')}", file=sys.stderr, flush=True)
    return FAILED


def leave(code: int) -> NoReturn:
    """Exits with `code`.

    If torch.distributed is initialized, it ends the process without Python's normal shutdown, which would warn or hang.
    """
    if code:
        note_code(code)
    if code in ALONE and WORKER in os.environ:
        time.sleep(60)  # launch/workers.py kills the other ranks first, then this one
    if _joined():
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def _joined() -> bool:
    distributed = sys.modules.get("torch.distributed")
    return distributed is not None and distributed.is_available() and distributed.is_initialized()


def _place() -> str:
    """Returns the name of this rank for the beginning of a sentence; nothing if it is the only one."""
    return f"rank {rank()} on {socket.gethostname()}: " if world_size() > 1 else ""
