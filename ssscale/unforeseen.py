"""What is said of an error that nobody foresaw: one sentence, and where its whole traceback is."""

import os
import tempfile
import time
import traceback


def describe(error: BaseException, command: str) -> str:
    """One sentence that names the error and the file of its traceback; with the traceback where no file can be written."""
    first = (str(error).splitlines() or [""])[0][:300]
    text = "".join(traceback.format_exception(error))
    sentence = f"{command}: {type(error).__name__}: {first}"
    try:
        prefix = f"ssscale-{command}-{time.strftime('%Y%m%d-%H%M%S')}-"
        descriptor, name = tempfile.mkstemp(".txt", prefix)
        with os.fdopen(descriptor, "w", encoding="utf-8", errors="backslashreplace") as file:
            file.write(text)
    except OSError:
        return f"{sentence}; nobody foresaw this:\n{text}"
    return f"{sentence}; nobody foresaw this: the whole traceback is in {name}"


def describe_os_error(error: OSError) -> str | None:
    """One sentence for what the system refuses of a file, None where it names no file."""
    if error.filename is None or error.strerror is None:
        return None
    name = os.fsdecode(error.filename) if isinstance(error.filename, bytes) else str(error.filename)
    return f"{name}: {error.strerror}"
