"""Damage of every kind, and kills, until the asked number has been tried.

    python -m tests.chaos [--cases 30] [--kills 1000] [--pairs 50] [--seed 0] [--jobs 2] [--only KIND:NUMBER ...] [--out FILE]

--cases: of each kind. --kills: of a run of one rank. --pairs: kills of one of two ranks. Exit code 1 where something came out
differently from what its kind declares; the case is named, and `--only KIND:NUMBER --seed N` tries it again.
"""

import argparse
import json
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.chaos.attempt import KINDS, attempt, make_world
from tests.chaos.kills import kill_all, kill_one_of_two
from tests.chaos.scene import WrongOutcomeError


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=30)
    parser.add_argument("--kills", type=int, default=1000)
    parser.add_argument("--pairs", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--only", nargs="+", default=[], metavar="KIND:NUMBER")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="ssscale-chaos-") as folder:
        sys.exit(record(options, Path(folder)))


def record(options: argparse.Namespace, folder: Path) -> int:
    began = time.monotonic()
    world = make_world(folder)
    cases = [(name, int(number)) for name, _, number in (only.partition(":") for only in options.only)]
    cases = cases or [(name, number) for number in range(options.cases) for name in KINDS]
    failures: list[dict[str, str]] = []
    tried: Counter[str] = Counter()
    result: dict[str, object] = {"seed": options.seed, "failures": failures}

    def save() -> None:
        result.update(cases=tried.total(), by_kind=dict(tried), seconds=round(time.monotonic() - began))
        if options.out:
            options.out.parent.mkdir(parents=True, exist_ok=True)
            options.out.write_text(json.dumps(result, indent=1) + "\n")

    def fail(case: str, problem: str) -> None:
        failures.append({"case": case, "problem": problem})
        print(f"{case} FAILED: {problem}\n", flush=True)

    with ThreadPoolExecutor(options.jobs) as pool:
        problems = pool.map(lambda case: attempt(world, *case, options.seed), cases)
        for (name, number), problem in zip(cases, problems, strict=True):
            tried[name] += 1
            if problem:
                fail(f"{name}:{number}", problem)
            if tried.total() % len(KINDS) == 0:
                save()  # what was tried is known although this is stopped
    print(f"{tried.total()} cases of {len(tried)} kinds, {len(failures)} failures", flush=True)
    for name, number, kill in (
        ("kills", options.kills, kill_all),
        ("kills_of_one_of_two", options.pairs, kill_one_of_two),
    ):
        if number and not options.only:
            try:
                result[name] = kill(world, number, options.seed)
                print(name, result[name], flush=True)
            except WrongOutcomeError as wrong:
                fail(name, str(wrong))
            save()
    save()
    return 1 if failures else 0


if __name__ == "__main__":
    main()
