"""Reports of unexpected errors: one sentence, and the file with the traceback."""

import os
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


def describe_os_error(error: OSError) -> str | None:
    """Returns one sentence for an error of the operating system, or None if it names no file."""
    if error.filename is None or error.strerror is None:
        return None
    name = os.fsdecode(error.filename) if isinstance(error.filename, bytes) else str(error.filename)
    return f"{name}: {error.strerror}"
