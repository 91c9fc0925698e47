"""Reads and writes the files of a run. Imports no torch."""

import errno
import itertools
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import xxhash

logger = logging.getLogger("ssscale")

CHUNK = 2**26  # bytes per read or write


def checksum(file: Path) -> str:
    """Returns the XXH3-128 of a file in hexadecimal digits. Raises OSError."""
    digest = xxhash.xxh3_128()
    with open(file, "rb", buffering=0) as opened:
        while chunk := opened.read(CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def may(path: Path, mode: int) -> bool:
    """Whether this process, with its effective user, may access a path in the ways of `mode`, such as os.W_OK."""
    return os.access(path, mode, effective_ids=os.access in os.supports_effective_ids)


def refusal(folder: Path) -> str | None:
    """Returns why this process may not make files in a folder, such as `Permission denied`, or None. Writes nothing."""
    if may(folder, os.W_OK | os.X_OK):
        return None
    return os.strerror(errno.EROFS if os.statvfs(folder).f_flag & os.ST_RDONLY else errno.EACCES)


def write_file(path: Path, chunks: list[memoryview]) -> dict[str, Any]:
    """Writes a file and flushes it to disk. Returns its size `bytes` and checksum `xxh3`. Raises OSError."""
    digest, size = xxhash.xxh3_128(), 0
    with open(path, "wb", buffering=0) as file:
        for chunk in chunks:
            digest.update(chunk)
            size += len(chunk)
            while chunk:
                chunk = chunk[file.write(chunk) :]
        os.fsync(file.fileno())
    return {"bytes": size, "xxh3": digest.hexdigest()}


@contextmanager
def replacing(file: Path) -> Iterator[Path]:
    """Yields a temporary path. What the block writes there then replaces `file`, at once.

    If the block fails, the temporary file is removed and `file` stays as it was. An OSError then names `file`; that of a
    full disk names none by itself.
    """
    temporary = file.with_name(f".{file.name}")
    try:
        yield temporary
        os.replace(temporary, file)
    except BaseException as error:  # Ctrl-C leaves no temporary file either
        with suppress(OSError):
            temporary.unlink()
        if isinstance(error, OSError) and error.errno is not None:
            error.filename = str(file)
        raise


def move_folder_aside(path: Path) -> None:
    """Renames a folder that has the name of one of the run's files. Its contents stay as they are. Raises OSError."""
    if not path.is_dir():
        return
    aside = next(
        name
        for number in itertools.count()
        if not os.path.lexists(name := path.with_name(f"{path.name}.aside-{number}"))
    )
    logger.warning("%s is a folder where a file should be; it is moved to %s", path, aside.name)
    path.rename(aside)


def fsync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
