"""Builds a folder under another name, so that it is complete as soon as it has its own. Imports no torch."""

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ssscale.errors import UserError
from ssscale.train.checkpoint_folder import check_empty

MARK = ".unfinished"  # a file in OUT.partial, by which the next command knows that it may be removed


@contextmanager
def building(out: Path) -> Iterator[Path]:
    """Yields the folder OUT.partial, which becomes `out` when the block ends. If the block fails, it is removed.

    What a killed process has left is removed first. Raises UserError if `out` is not empty, if another process builds it,
    and if OUT.partial is a folder that was not made here.
    """
    check_empty(out)
    whole = out.resolve()
    partial = whole.with_name(f"{whole.name}.partial")
    mark = partial / MARK
    if os.path.lexists(partial) and not _is_ours(partial):
        raise UserError(f"out={out} is built in {partial}, which exists and is something else: move it away")
    partial.mkdir(parents=True, exist_ok=True)
    with mark.open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"out={out} is being written by another process: wait for it or stop it") from None
        except OSError:  # a file system without locks
            pass
        try:
            for left in partial.iterdir():
                if left.is_dir() and not left.is_symlink():
                    shutil.rmtree(left)
                elif left != mark:
                    left.unlink()
            yield partial
            os.replace(partial, whole)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
        with suppress(OSError):  # the folder is complete
            (whole / MARK).unlink()


def _is_ours(partial: Path) -> bool:
    """Whether a folder is the one of a killed `building`, which may have had no time to mark it."""
    if partial.is_symlink() or not partial.is_dir():
        return False
    mark = partial / MARK
    return (mark.is_file() and not mark.is_symlink()) or not any(partial.iterdir())
