"""What the commands of this folder share: their arguments and how a mistake of the user ends."""

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from ssscale.errors import FAILED, TOGETHER, Stop, UserError
from ssscale.options import take_options
from ssscale.unforeseen import describe, describe_os_error

__all__ = ["note_code", "run", "take_options"]


def note_code(code: int) -> None:
    """Tell slurm/pretrain.sbatch, whose srun answers with the code of ranks that it killed."""
    file = os.environ.get("SSSCALE_EXIT_CODES")
    if file:
        with open(file, "a") as opened:
            opened.write(f"{code}\n")


def end_of(error: Exception) -> int:
    """Say one sentence about an error that is neither the user's nor an ending, and return the exit code."""
    refused = describe_os_error(error) if isinstance(error, OSError) else None
    if refused is not None:
        print(f"error: {refused}", file=sys.stderr, flush=True)
        return 2
    print(f"failed: {describe(error, Path(sys.argv[0]).stem or 'python')}", file=sys.stderr, flush=True)
    return FAILED


def run(main: Callable[[list[str]], None], usage: str | None = None) -> NoReturn:
    """Call main(argv) and exit: 0, or with one sentence on stderr 2 (UserError) or a Stop's code. --help prints `usage`."""
    argv = sys.argv[1:]
    if argv and argv[0] in ("-h", "--help"):
        print((usage or "").strip())
        sys.exit(0)
    try:
        main(argv)
    except UserError as error:
        if os.environ.get("RANK", "0") != "0":
            # Mostly all ranks meet the same mistake. The main one says it; the launcher ends the others meanwhile, and what
            # only this rank has met is still said.
            time.sleep(5)
        print(f"error: {error}", file=sys.stderr, flush=True)
        note_code(2)
        sys.exit(2)
    except Stop as stop:
        alone = stop.code not in TOGETHER
        if alone or os.environ.get("RANK", "0") == "0":
            print(f"stopped: {stop}", file=sys.stderr, flush=True)
        note_code(stop.code)
        if alone:
            os._exit(stop.code)  # process groups without their peers may hang in their destructors
        sys.exit(stop.code)
    except Exception as error:
        code = end_of(error)
        note_code(code)
        sys.stdout.flush()
        os._exit(code)  # as above
    sys.exit(0)
