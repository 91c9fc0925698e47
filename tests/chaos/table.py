"""docs/faults.md: what is promised of every fault, made of the tests that show it.

python -m tests.chaos.table
"""

import importlib
import json
from collections.abc import Iterable
from pathlib import Path

from tests.chaos.attempt import KINDS
from tests.chaos.scene import ROOT
from tests.promises import PROMISES

FILE = ROOT / "docs/faults.md"
RECORD = ROOT / "docs/results/chaos.json"
MODULES = [
    f"tests.train.test_{name}"
    for name in ("kill", "stop", "workers", "lost", "lost_views", "saves", "logs", "faults", "bad_input")
]
MODULES += ["tests.slurm.test_slurm", "tests.slurm.test_cluster"]
AREAS = ("Stops and starts", "Files and disks", "Ranks", "Losses", "Slurm")
COLUMNS = ("what happens", "what is seen", "exit code", "same bits")
HEAD = """# Faults

This page lists every tested fault: what the user sees, the exit code, and whether the run then ends with the same losses,
weights and moments, to the last bit, as a run without the fault. `python -m tests.chaos.table` writes it from the tests.

[Exit codes](reference/exit_codes.md) has the meaning of each code. After codes 75 and 76 the same command continues, which
`pretrain.sbatch` does by itself. An empty cell means that it does not apply, or that no test checks it.
"""
CHAOS = """
## Random damage and kills
`make test-chaos` tries each row below many times. The file, the bytes and the moment are random; the right outcome is declared
beforehand (`tests/chaos/`). The following count as failures: a traceback, exit code 70, a hang of more than 60 s, a run that
starts over, a write outside of the run's folders, and a result that differs by a bit. `make test-long`
tries some of the rows once.
"""


def table(rows: Iterable[tuple[str, ...]], head: tuple[str, ...]) -> list[str]:
    lines = [head, tuple("---" for _ in head), *rows]
    return ["| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines]


def recorded() -> list[str]:
    """What the last whole run of the chaos test has seen."""
    if not RECORD.is_file():
        return []
    found = json.loads(RECORD.read_text())
    single, pairs = found["kills"], found["kills_of_one_of_two"]
    return [
        f"\nRecorded on {found['date']} at commit {found['commit']}: {found['cases']:,} cases, at least "
        f"{min(found['by_kind'].values())} of each of {len(found['by_kind'])} kinds; {single['kills']:,} times `kill -9` "
        f"of a run of one rank ({single['steps']:,} steps); {pairs['kills']} times of one of two ranks "
        f"({pairs['steps']:,} steps). "
        f"{len(found['failures'])} failures.\n"
    ]


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
