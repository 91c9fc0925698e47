"""Output that cannot be written, and unexpected errors: one sentence, and the file that holds the traceback."""

import errno
import io
import os
import select
import sys
import tempfile
import time
import traceback

FULL = (errno.ENOSPC, errno.EDQUOT)


def describe(error: BaseException, command: str) -> str:
    """Writes the traceback to a temporary file and returns one sentence that names the error and that file.

    If no file can be written, the traceback is appended to the sentence instead.
    """
    first = (str(error).splitlines() or [""])[0][:300]
    text = "".join(traceback.format_exception(error))
    sentence = f"{command}: {type(error).__name__}: {first}"
    try:
        prefix = f"ssscale-{command}-{time.strftime('%Y%m%d-%H%M%S')}-"
        descriptor, name = tempfile.mkstemp(".txt", prefix)
        with os.fdopen(descriptor, "w", encoding="utf-8", errors="backslashreplace") as file:
            file.write(text)
    except OSError:
        return f"{sentence}; an unexpected error:\n{text}"
    return f"{sentence}; an unexpected error: the whole traceback is in {name}"


def output_unread(error: BaseException) -> bool:
    """Whether the error comes from printing to a program that has ended, as in `COMMAND | head`.

    If so, what is left to print is discarded, because Python would complain when it exits.
    """
    if not isinstance(error, BrokenPipeError):
        return False
    poll = select.poll()
    poll.register(1, 0)
    if not any(event & select.POLLERR for _, event in poll.poll(0)):
        return False
    _discard_output()
    return True


def _output_full() -> bool:
    """Whether the disk of stdout is full. To find out, a line is added: Python drops what it could not write."""
    try:
        if not sys.stdout.isatty():
            os.write(sys.stdout.fileno(), b"\n")
    except OSError as error:
        return error.errno in FULL
    return False


def _discard_output() -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def prepare_output() -> None:
    """Lets stdout print `?` for characters that its encoding lacks, such as → in ASCII, in place of an error.

    If the caller has closed stdout or stderr, they become /dev/null. Otherwise the next file that is opened would take the
    place of stdout, and what libraries print would go into it.
    """
    if sys.stdout is None:
        sys.stdout = os.fdopen(
            os.open(os.devnull, os.O_WRONLY), "w"
        )  # takes the lowest free number, which is that of stdout
    if sys.stderr is None:
        sys.stderr = os.fdopen(os.open(os.devnull, os.O_WRONLY), "w")
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="replace")


def describe_os_error(error: OSError) -> str | None:
    """Returns one sentence for an error of the operating system.

    None if the error does not name a file, unless a disk is full. If that is the one of stdout, what is left to print is
    discarded, because Python would complain when it exits.
    """
    if error.strerror is None:
        return None
    if error.filename is None:
        if error.errno not in FULL:
            return None
        if _output_full():
            _discard_output()
            return f"the output cannot be written: {error.strerror}"
        return f"{error.strerror}: make room for the files that this command writes"
    name = os.fsdecode(error.filename) if isinstance(error.filename, bytes) else str(error.filename)
    return f"{name}: {error.strerror}"
