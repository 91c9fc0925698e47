"""Reading and writing files of a run; needs no torch."""

import itertools
import logging
import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

import xxhash

from ssscale.errors import UserError

logger = logging.getLogger("ssscale")

CHUNK = 2**26  # bytes read at once

T = TypeVar("T")


def checksum(file: Path) -> str:
    """XXH3-128 of a file, in hexadecimal digits."""
    digest = xxhash.xxh3_128()
    with open(file, "rb", buffering=0) as opened:
        while chunk := opened.read(CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def write_file(path: Path, chunks: list[memoryview]) -> dict[str, Any]:
    """Write and flush a file; its size and checksum."""
    digest, size = xxhash.xxh3_128(), 0
    with open(path, "wb", buffering=0) as file:
        for chunk in chunks:
            digest.update(chunk)
            size += len(chunk)
            while chunk:
                chunk = chunk[file.write(chunk) :]
        os.fsync(file.fileno())
    return {"bytes": size, "xxh3": digest.hexdigest()}


def move_folder_aside(path: Path) -> None:
    """Free the name of one of the run's files where a folder has taken it; the folder keeps what it holds. Raises OSError."""
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


def retry_seconds() -> float:
    """How long something unreadable is tried again: SSSCALE_READ_RETRY_S, 30 seconds where it is not set."""
    text = os.environ.get("SSSCALE_READ_RETRY_S", "30")
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < 1e9:
        raise UserError(f"SSSCALE_READ_RETRY_S={text} is not a number of seconds")
    return seconds


def patiently(call: Callable[[], T], what: Path) -> T:
    """call(), again while it raises OSError. Raises UserError when it still does after `retry_seconds`."""
    end = time.monotonic() + retry_seconds()
    for wait in waits():
        try:
            return call()
        except OSError as error:
            if time.monotonic() > end:
                raise UserError(f"{what} cannot be read: {error.strerror}; nothing there was changed") from error
            logger.warning("%s cannot be read: %s; trying again", what, error.strerror)
            time.sleep(wait)
    raise AssertionError


def waits() -> Iterable[float]:
    """Seconds between one attempt to read and the next."""
    return itertools.chain((0.5, 1.0, 2.0, 4.0), itertools.repeat(8.0))
