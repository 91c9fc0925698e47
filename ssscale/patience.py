"""Repeats reading that fails, as network file systems have errors that pass. Imports no torch."""

import itertools
import logging
import os
import time
from collections.abc import Callable, Container, Iterable
from pathlib import Path
from typing import TypeVar

from ssscale.errors import UserError

logger = logging.getLogger("ssscale")

T = TypeVar("T")


def retry_seconds() -> float:
    """Returns for how many seconds reading is retried: SSSCALE_READ_RETRY_S, or 30 if it is not set.

    Raises UserError if the variable is not a number of seconds.
    """
    text = os.environ.get("SSSCALE_READ_RETRY_S", "30")
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < 1e9:
        raise UserError(f"SSSCALE_READ_RETRY_S={text} is not a number of seconds")
    return seconds


def patiently(call: Callable[[], T], what: Path | str, passing: Container[int | None] | None = None) -> T:
    """Returns call(), which is retried while it raises OSError. what: the path for messages, or a name with it.

    passing: error numbers that may pass; others are raised at once. None: all may.
    Raises UserError if it still fails after `retry_seconds`.
    """
    end = time.monotonic() + retry_seconds()
    for wait in waits():
        try:
            return call()
        except OSError as error:
            if passing is not None and error.errno not in passing:
                raise
            if time.monotonic() > end:
                raise UserError(f"{what} cannot be read: {error.strerror}; nothing there was changed") from error
            logger.warning("%s cannot be read: %s; trying again", what, error.strerror)
            time.sleep(wait)
    raise AssertionError


def waits() -> Iterable[float]:
    """Returns the seconds to wait before each further attempt to read."""
    return itertools.chain((0.5, 1.0, 2.0, 4.0), itertools.repeat(8.0))
