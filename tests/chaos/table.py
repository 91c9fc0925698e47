"""Writes docs/faults.md, the page of all faults, from the promises in the tests.

python -m tests.chaos.table
"""

import importlib
import json
import textwrap
from collections.abc import Iterable
from pathlib import Path

from tests.chaos.attempt import KINDS
from tests.chaos.scene import ROOT
from tests.promises import PROMISES

FILE = ROOT / "docs/faults.md"
RECORD = ROOT / "docs/results/chaos.json"
NAMES = (
    "kill",
    "stop",
    "workers",
    "lost",
    "lost_views",
    "saves",
    "logs",
    "faults",
    "bad_input",
    "data_faults",
    "observe",
)
MODULES = [f"tests.train.test_{name}" for name in (*NAMES, "rendezvous")]
MODULES += ["tests.slurm.test_slurm", "tests.slurm.test_cluster", "tests.slurm.test_submit"]
AREAS = ("Stops and starts", "Files and disks", "Ranks", "Losses", "Slurm")
COLUMNS = ("what happens", "what is seen", "exit code", "same bits")
HEAD = """# Faults

This page lists every tested fault. `python -m tests.chaos.table` writes it from the tests.

**Exit code.** [Exit codes](reference/exit_codes.md) explains each code. After codes 75, 76, 79 and 128 + signal, run
the same command again to continue. `pretrain.sbatch` does this by itself, except after 79.

**Same bits.** This column compares the run with a run that did not have the fault:

- `yes`: both end with the same losses, weights and optimizer moments, to the last bit.
- `losses`: the losses are the same, to the last bit. Weights and moments are not compared.
- `from the last save`: the steps after the last save are lost. The same command continues from that save and trains
  them again.
- `nothing is changed`: the command ends and leaves the run folder as it was. If the fault is in the data folder, the
  checkpoints stay as they were, and other files may record the start.

**Empty cells.** The column does not apply to the fault, or no test checks it.
"""
CHAOS = """
## Random damage and kills
`make test-chaos` tries each row below many times. The file, the bytes and the moment are random. The right outcome is
declared in `tests/chaos/` before a case runs. A case fails if there is a traceback, an exit code other than the
declared ones, a hang of more than 60 s, a run that starts again from step 0, a write outside of the run's folders, or a
result that differs by a bit. `make test-long` tries some of the rows once.

In the column "exit code", "2, then 0" means that the command ends with 2 and that the same command then ends with 0.
"""


def table(rows: Iterable[tuple[str, ...]], head: tuple[str, ...]) -> list[str]:
    lines = [head, tuple("---" for _ in head), *rows]
    return ["| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines]


def recorded() -> list[str]:
    """Returns the line on the last whole run of the chaos test."""
    if not RECORD.is_file():
        return []
    found = json.loads(RECORD.read_text())
    single, pairs = found["kills"], found["kills_of_one_of_two"]
    line = (
        f"Recorded on {found['date']} at commit {found['commit']}: {found['cases']:,} cases, at least "
        f"{min(found['by_kind'].values())} of each of {len(found['by_kind'])} kinds; {single['kills']:,} kills (`kill -9`) "
        f"of a run of one rank ({single['steps']:,} steps); {pairs['kills']} kills of one of two ranks "
        f"({pairs['steps']:,} steps). {len(found['failures'])} failures."
    )
    return ["\n" + textwrap.fill(line, 120) + "\n"]


def text() -> str:
    for module in MODULES:
        importlib.import_module(module)
    lines = [HEAD]
    unknown = {promise.area for promise in PROMISES} - set(AREAS)
    assert not unknown, unknown
    for area in AREAS:
        rows = [
            (p.fault, p.seen, p.code, p.identical, p.do, f"`{p.test.removeprefix('tests/')}`")
            for p in sorted(PROMISES, key=lambda promise: (promise.test, promise.fault))
            if p.area == area
        ]
        lines += [
            f"## {area}",
            *table(rows, ("what happens", "what is seen", "exit code", "same bits", "what to do", "test")),
            "",
        ]
    lines += [CHAOS.strip(), *recorded()]
    for area in dict.fromkeys(kind.area for kind in KINDS.values()):
        rows = [
            (k.fault, k.seen, k.outcome.code, k.outcome.identical, f"`{k.name}`")
            for k in KINDS.values()
            if k.area == area
        ]
        lines += [f"### {area}", *table(rows, (*COLUMNS, "kind")), ""]
    return "\n".join(lines).rstrip() + "\n"


def main() -> None:
    FILE.write_text(text())
    print(FILE.relative_to(Path.cwd()) if FILE.is_relative_to(Path.cwd()) else FILE)


if __name__ == "__main__":
    main()
