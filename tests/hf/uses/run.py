"""Run the uses in a process that knows transformers and nothing of ours. Arguments: the folders and the results, as JSON.

Given: {"subjects": [fields of Subject], "slow": bool, "only": pattern of names}. Without `slow`, slow uses are left out, and
the others run with one mixer each, in turn, except for `forward`. Found: {"version", "cells": {use: {mixer: "works", a
sentence, or "FAILED: …"}}, "seconds": {use}, "groups": {use}, "names": of all uses}.
"""

import contextlib
import io
import json
import re
import shutil
import sys
import tempfile
import time
import traceback
import warnings
from pathlib import Path

import torch
import transformers

from tests.hf.uses import caches, forward, generation, loading, peft_uses, tools, training  # noqa: F401
from tests.hf.uses.subject import USES, Subject, Use


def outcome(use: Use, subject: Subject) -> str:
    printed = io.StringIO()
    torch.manual_seed(0)
    try:
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
            sentence = use.run(subject)
    except Exception as error:  # whatever it is, it becomes the cell of the table
        lines = traceback.format_exc().splitlines()
        where = [line.strip() for line in lines if "tests/hf" in line or "_ssscale.py" in line]
        return f"FAILED: {type(error).__name__}: {str(error)[:600]} ({' < '.join(where[::-1][:3])})"
    return sentence or "works"


def main(given: Path, found: Path) -> None:
    asked = json.loads(given.read_text())
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    cells: dict[str, dict[str, str]] = {}
    seconds: dict[str, float] = {}
    groups: dict[str, str] = {}
    for turn, entry in enumerate(asked["subjects"]):
        scratch = Path(tempfile.mkdtemp())
        subject = Subject(entry["mixer"], Path(entry["folder"]), Path(entry["bfloat16"]), Path(entry["other"]), scratch)
        for number, use in enumerate(USES):
            due = use.group == "forward" or number % len(asked["subjects"]) == turn
            if not (asked["slow"] or (due and not use.slow)) or not re.search(asked["only"], use.name):
                continue
            subject.scratch = Path(tempfile.mkdtemp(dir=scratch))
            begin = time.monotonic()
            cells.setdefault(use.name, {})[subject.mixer] = outcome(use, subject)
            seconds[use.name] = seconds.get(use.name, 0.0) + time.monotonic() - begin
            groups[use.name] = use.group
            print(
                f"{seconds[use.name]:.1f} s {use.name}, {subject.mixer}: {cells[use.name][subject.mixer]}", flush=True
            )
        shutil.rmtree(scratch)
    ours = [name for name in sys.modules if name.split(".")[0] in ("ssscale", "megatron")]
    assert not ours, ours
    names = [use.name for use in USES]
    assert len(set(names)) == len(names), names
    results = {
        "version": transformers.__version__,
        "names": names,
        "cells": cells,
        "seconds": seconds,
        "groups": groups,
    }
    found.write_text(json.dumps(results, indent=1, ensure_ascii=False))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
