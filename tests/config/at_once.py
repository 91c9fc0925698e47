"""Runs commands, each in a process forked from this one, which has imported packages that all of them need.

`python -S tests/config/at_once.py` reads a command per line. For each it prints a JSON object: exit code, output, errors,
the packages that were imported at the end, and seconds of processor time, with those of the start and the imports here.
"""

import importlib
import json
import os
import runpy
import sys
import time
import traceback
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

SHARED = ("omegaconf", "psutil", "yaml")


def execute(words: list[str]) -> None:
    """As `python WORDS`."""
    if words[0] == "-m":
        sys.path[0], sys.argv = os.getcwd(), words[1:]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.path[0], sys.argv = str(Path(words[0]).resolve().parent), words
        runpy.run_path(words[0], run_name="__main__")


def become(words: list[str], descriptors: list[int]) -> None:
    """Runs a command in this process and ends it. descriptors: of the files for output, errors and packages."""
    for number, descriptor in enumerate(descriptors[:2], start=1):
        os.dup2(descriptor, number)
    code = 0
    try:
        execute(words)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else bool(end.code)
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os.write(descriptors[2], json.dumps(sorted({name.partition(".")[0] for name in sys.modules})).encode())
    os._exit(code)


def answer(words: list[str], before: float) -> dict[str, Any]:
    with ExitStack() as stack:
        files = [stack.enter_context(TemporaryFile()) for _ in range(3)]
        child = os.fork()
        if child == 0:
            become(words, [file.fileno() for file in files])
        _, status, used = os.wait4(child, 0)
        texts = [os.pread(file.fileno(), 1 << 24, 0).decode() for file in files]
    return {
        "code": os.waitstatus_to_exitcode(status),
        "output": texts[0],
        "errors": texts[1],
        "packages": json.loads(texts[2]),
        "seconds": before + used.ru_utime + used.ru_stime,
    }


def main() -> None:
    for name in SHARED:
        importlib.import_module(name)
    before = time.process_time()
    for line in sys.stdin:
        print(json.dumps(answer(line.split(), before)), flush=True)


if __name__ == "__main__":
    main()
