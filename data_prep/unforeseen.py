"""Output that cannot be written, and unexpected errors: one sentence, and the file that holds the traceback."""

import io
import os
import sys
import tempfile
import time
import traceback


def describe(error: BaseException, command: str) -> str:
    """Returns one sentence with the error and the file of its traceback, or the traceback if no file can be written."""
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


def output_full() -> bool:
    """Whether the disk of stdout is full. To find out, a line is added: Python drops what it could not write.

    If so, what is left to print is discarded, because Python would complain when it exits.
    """
    try:
        if not sys.stdout.isatty():
            os.write(sys.stdout.fileno(), b"\n")
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return True
    return False
