"""The page of what works in transformers: `python -m tests.hf.table` writes docs/reference/transformers.md.

SSSCALE_TRANSFORMERS_5 must name a folder of `pip install --target` with transformers 5; `make test-transformers5` makes
it. Each version runs in a process of its own, which knows the exported folders and nothing of this package.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from eval.checkpoint.environment import prepare

prepare()

from ssscale.hf.convert import export_checkpoint
from ssscale.parallel.groups import Groups, initialize
from tests.hf.jobs import make_tokenizer, write_checkpoint
from tests.models import make_model

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "reference" / "transformers.md"
FIVE = "SSSCALE_TRANSFORMERS_5"
# The vocabularies are larger than the tokenizer's. One model has biases, and norms of queries and keys.
MIXERS = {
    "softmax": replace(make_model("softmax"), vocab_size=304),
    "SSMax": replace(make_model("ssmax", tied=True), vocab_size=304, qkv_bias=True, qk_norm=True),
    "stick-breaking": replace(make_model("stickbreaking"), vocab_size=304),
}
GROUPS = {
    "loading": "Loading and saving",
    "forward": "One forward pass",
    "caches": "Caches",
    "generation": "Generation",
    "training": "Training",
    "peft_uses": "PEFT",
    "tools": "Pipelines and tools",
}
HEAD = """# What works in transformers

`python -m tests.hf.table` writes this page. It exports a small model of each mixer (attention mechanism) and uses it as
users of transformers do, in the two pinned versions. A cell says *works* if the values agree with a reference in
float64 that reads the same folder and is independent of the exported code (`tests/hf/uses/`). Other cells name a note
below the tables, which has the message that the user reads.

`make test-long` runs nearly all rows with transformers {four} and compares them with this page: the forward passes
with all mixers, and every other row with one of them. `make test-transformers5` runs all rows with both versions.
Everything ran on a CPU, `torch.compile` with `backend="aot_eager"`. The SSMax model also has `model.qkv_bias` and
`model.qk_norm`.
"""

Cells = dict[str, dict[str, str]]


def make_subjects(folder: Path, groups: Groups) -> list[dict[str, str]]:
    """Exports a model of each mixer in float32 and in bfloat16."""
    tokenizer = make_tokenizer(folder / "tokenizer.json")
    subjects = []
    for mixer, model in MIXERS.items():
        run = folder / mixer
        write_checkpoint(model, groups, run, tokenizer)
        entry = {"mixer": mixer}
        for key, dtype in (("folder", "float32"), ("bfloat16", "bfloat16")):
            entry[key] = str(run / f"{mixer}_{dtype}".replace("-", "_"))
            export_checkpoint(run / "checkpoints" / "step-00000007", Path(entry[key]), 0, 0, dtype)
        subjects.append(entry)
    for entry, other in zip(subjects, [*subjects[1:], subjects[0]]):
        entry["other"] = other["folder"]
    return subjects


def run_uses(subjects: list[dict[str, str]], folder: Path, packages: str, slow: bool, only: str = "") -> dict[str, Any]:
    """Runs the uses in a new process. packages: a folder whose transformers comes before the installed one, or empty."""
    given, found = folder / "given.json", folder / "found.json"
    given.write_text(json.dumps({"subjects": subjects, "slow": slow, "only": only}))
    paths = [packages, str(ROOT), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "HF_MODULES_CACHE": str(folder / f"modules{'5' if packages else ''}"),
        "HF_HUB_OFFLINE": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "TRANSFORMERS_VERBOSITY": "error",
    }
    command = [sys.executable, "-m", "tests.hf.uses.run", str(given), str(found)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=3000)
    assert done.returncode == 0, done.stderr[-3000:]
    results = json.loads(found.read_text())
    results["cells"] = {
        use: {mixer: sentence(cell, subjects) for mixer, cell in row.items()} for use, row in results["cells"].items()
    }
    return results


def sentence(cell: str, subjects: list[dict[str, str]]) -> str:
    """Returns the text of a cell without what differs from run to run."""
    for subject in subjects:
        cell = cell.replace(subject["folder"], "FOLDER").replace(subject["folder"].lstrip("/"), "FOLDER")
    cell = re.sub(r"transformers_modules\.\w+\.", "", cell)
    return cell if len(cell) < 300 or cell.startswith("FAILED") else cell[:300].rsplit(" ", 1)[0] + " …"


def write_page(versions: list[dict[str, Any]]) -> str:
    """Returns the page. versions: results of `run_uses`."""
    notes: dict[str, int] = {}
    count = 0
    lines = []
    names = [version["version"] for version in versions]
    columns = [f"{mixer} {name}" for name in names for mixer in MIXERS]
    for group, title in GROUPS.items():
        lines += ["", f"## {title}", "", f"| | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
        for use, row in versions[0]["cells"].items():
            if versions[0]["groups"][use] != group:
                continue
            count += 1
            cells = []
            for version in versions:
                for mixer in MIXERS:
                    cell = version["cells"][use][mixer]
                    cells.append(cell if cell == "works" else f"note {notes.setdefault(cell, len(notes) + 1)}")
            assert row.keys() == MIXERS.keys()
            lines.append(f"| {use} | {' | '.join(cells)} |")
    lines += ["", "## Notes", ""]
    lines += [f"{number}. {note.replace('|', chr(92) + '|')}" for note, number in notes.items()]
    summary = f"\n{count} uses, {len(MIXERS)} mixers, transformers {' and '.join(names)}.\n"
    return HEAD.format(four=names[0]) + summary + "\n".join(lines) + "\n"


def read_page(text: str) -> dict[str, Cells]:
    """Returns the cells by version, with the notes in their places."""
    notes = {f"note {n}": t.replace("\\|", "|") for n, t in re.findall(r"^(\d+)\. (.+)$", text, re.MULTILINE)}
    found: dict[str, Cells] = {}
    columns: list[str] = []
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        if line.startswith("| |"):
            columns = line.strip("| ").split(" | ")
        elif line.startswith("| "):
            for column, cell in zip(columns, cells[1:], strict=True):
                mixer, _, version = column.rpartition(" ")
                found.setdefault(version, {}).setdefault(cells[0], {})[mixer] = notes.get(cell, cell)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="a pattern of names of uses; prints and writes no page")
    parser.add_argument("--version", choices=("4", "5", "both"), default="both")
    parser.add_argument("--fast", action="store_true")
    options = parser.parse_args()
    packages = os.environ.get(FIVE, "")
    if options.version != "4" and not packages:
        sys.exit(f"error: {FIVE} names no folder with transformers 5: run `make test-transformers5`")
    whole = options.version == "both" and not options.only and not options.fast
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        subjects = make_subjects(folder, initialize())
        wanted = {"4": [""], "5": [packages], "both": ["", packages]}[options.version]
        results = [run_uses(subjects, folder, where, not options.fast, options.only) for where in wanted]
    for result in results:
        for use, row in result["cells"].items():
            failed = {mixer: cell for mixer, cell in row.items() if cell != "works"}
            print(f"{result['version']} {result['seconds'][use]:6.1f} s  {use}", *failed.items(), sep="\n    ")
        print(f"{sum(result['seconds'].values()):.0f} s")
    if whole:
        PAGE.write_text(write_page(results), encoding="utf-8")


if __name__ == "__main__":
    main()
