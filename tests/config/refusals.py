"""Commands that must refuse at once, with one sentence and without allocating GiB."""

import resource
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import pytest

from ssscale.errors import UserError

SECONDS = 10


class TooLate(BaseException):
    """Not caught by any command."""


@contextmanager
def at_once() -> Iterator[None]:
    """Raises TooLate after SECONDS, and MemoryError where GiB are allocated."""

    def late(number: int, frame: FrameType | None) -> None:
        raise TooLate

    before = signal.signal(signal.SIGALRM, late)
    limits = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + 2**31, limits[1]))
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
        resource.setrlimit(resource.RLIMIT_AS, limits)


def refuses(command: Callable[[list[str]], None], arguments: list[str]) -> str:
    with at_once(), pytest.raises(UserError) as found:
        command(arguments)
    sentence = str(found.value)
    assert "\n" not in sentence, sentence
    return sentence
