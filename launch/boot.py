"""What the commands of launch/ and slurm/ share: how one starts and ends, which rank it is, what it logs.

A command declares its options once, as a `Command`, and ends with `run(COMMAND, main)`. Nothing here, and nothing that a
command imports at its top, imports torch: --help and the sentence after a mistake must not wait for it.
"""

import logging
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from launch.process import WORKER, rank_environment
from ssscale.errors import FAILED, OUT_OF_MEMORY, TOGETHER, Stop, UserError
from ssscale.options import EVERY_KEY, Command, Option
from ssscale.unforeseen import describe, describe_os_error

__all__ = [
    "EVERY_KEY",
    "ROOT",
    "Command",
    "Option",
    "join_ranks",
    "leave",
    "log",
    "note_code",
    "rank",
    "run",
    "world_size",
]

ROOT = Path(__file__).resolve().parents[1]
EXIT_CODES = "SSSCALE_EXIT_CODES"  # the variable that names a file for the codes with which ranks end
ALONE = (2, FAILED, OUT_OF_MEMORY)  # codes with which a rank ends while others are inside a collective with it
INTERRUPTED = 130  # as a shell says of a command that Ctrl-C has ended


def join_ranks() -> None:
    """Make a task of srun a rank, as torchrun's workers and ours are already."""
    os.environ |= rank_environment(os.environ)


def rank() -> int:
    return int(os.environ.get("RANK", "0"))


def world_size() -> int:
    return int(os.environ.get("WORLD_SIZE", "1"))


def log(level: int = logging.INFO, force: bool = True) -> None:
    """Our own messages from `level` on and the warnings of libraries, on the main rank; elsewhere errors alone.

    force: take the place of handlers that something imported has set up.
    """
    main = rank() == 0
    logging.basicConfig(level=logging.WARNING if main else logging.ERROR, format="%(message)s", force=force)
    for name in ("ssscale", "ssscale_kernels"):
        logging.getLogger(name).setLevel(level if main else logging.ERROR)


def note_code(code: int) -> None:
    """Tell slurm/pretrain.sbatch, whose srun answers with the code of ranks that it killed, or launch/workers.py."""
    file = os.environ.get(EXIT_CODES)
    if file:
        with open(file, "a") as opened:
            opened.write(f"{code}\n")


def run(command: Command, main: Callable[[list[str]], None]) -> NoReturn:
    """Call main(argv) and exit: 0, or with one sentence on stderr 2 (UserError) or a Stop's code. --help prints the options."""
    argv = sys.argv[1:]
    command.help_if_asked(argv)
    try:
        main(argv)
    except UserError as error:
        if rank():
            # Mostly all ranks meet the same mistake. The main one says it; the launcher ends the others meanwhile, and what
            # only this rank has met is still said.
            time.sleep(5)
        print(f"error: {error}", file=sys.stderr, flush=True)
        leave(2)
    except Stop as stop:
        alone = stop.code not in TOGETHER
        if alone or rank() == 0:
            print(f"stopped: {stop}", file=sys.stderr, flush=True)
        leave(stop.code)
    except KeyboardInterrupt:
        leave(INTERRUPTED)
    except Exception as error:
        leave(end_of(error))
    sys.exit(0)


def end_of(error: Exception) -> int:
    """Say one sentence about an error that is neither the user's nor an ending, and return the exit code."""
    refused = describe_os_error(error) if isinstance(error, OSError) else None
    if refused is not None:
        print(f"error: {refused}", file=sys.stderr, flush=True)
        return 2
    print(f"failed: {describe(error, Path(sys.argv[0]).stem or 'python')}", file=sys.stderr, flush=True)
    return FAILED


def leave(code: int) -> NoReturn:
    """Exit; with process groups up, without the interpreter's shutdown: they would warn, or hang without their peers."""
    if code:
        note_code(code)
    if code in ALONE and WORKER in os.environ:
        time.sleep(60)  # launch/workers.py kills the other ranks first, then this one
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)
