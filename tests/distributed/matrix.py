"""The layouts that are tested against one process: `python -m tests.distributed.matrix` writes matrix.csv anew.

Greedy covering from a fixed seed: the rows of the fast suite (up to four processes) hold all pairs of values that four
processes can have; those of the slow suite (up to eight) complete all pairs and all triples of core × context × tensor.
"""

import csv
import itertools
import random
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

FILE = Path(__file__).with_name("matrix.csv")
CONTEXT = {  # (ulysses, ring)
    "1": (1, 1),
    "ulysses2": (2, 1),
    "ring2": (1, 2),
    "ulysses4": (4, 1),
    "ring4": (1, 4),
    "ulysses2_ring2": (2, 2),
}
FAST, SLOW = 4, 8  # processes


class Layout(NamedTuple):
    processes: int
    tensor: int
    sequence: bool
    context: str
    zero: int
    accumulation: int
    core: str
    variant: int  # of the core's two models in `matrix_jobs.MODELS`
    recompute: str

    @property
    def data(self) -> int:
        ulysses, ring = CONTEXT[self.context]
        return self.processes // (self.tensor * ulysses * ring)

    def __str__(self) -> str:
        sequence = "sp" if self.sequence else ""
        return (
            f"{self.core}{self.variant}-tp{self.tensor}{sequence}-cp{self.context}-dp{self.data}-z{self.zero}"
            f"-acc{self.accumulation}-{self.recompute}"
        )


def every(most: int) -> Iterator[Layout]:
    """All layouts of 2 to `most` processes whose 8 rows of 24 tokens divide."""
    processes = [n for n in (2, 4, 8) if n <= most]
    cores, recomputes = ("softmax", "ssmax", "stickbreaking"), ("none", "selective", "full")
    values = processes, (1, 2, 4), (False, True), CONTEXT, range(4), (1, 4), cores, (0, 1), recomputes
    for layout in itertools.starmap(Layout, itertools.product(*values)):
        ranks = layout.tensor * CONTEXT[layout.context][0] * CONTEXT[layout.context][1]
        if layout.processes % ranks or (layout.sequence and layout.tensor == 1):
            continue
        if layout.data * layout.accumulation <= 8:
            yield layout


def pairs(layout: Layout) -> set[tuple[object, ...]]:
    """Pairs of values; of the context, its size and its kind count as one value each."""
    ulysses, ring = CONTEXT[layout.context]
    kind = ("u" if ulysses > 1 else "") + ("r" if ring > 1 else "")
    values = {**layout._asdict(), "context": ulysses * ring, "kind": kind}
    return set(itertools.combinations(values.items(), 2))


def triple(layout: Layout) -> tuple[object, ...]:
    return layout.core, layout.context, layout.tensor


def generate(seed: int = 1) -> list[Layout]:
    random.seed(seed)
    fast, slow = list(every(FAST)), list(every(SLOW))
    found: list[Layout] = []
    cover(found, fast, lambda layout: pairs(layout))
    cover(found, slow, lambda layout: pairs(layout) | {triple(layout)})
    return found


def cover(found: list[Layout], layouts: list[Layout], wanted) -> None:
    """Add those of `layouts` that hold most of what no layout holds yet, until nothing is left."""
    left = set().union(*map(wanted, layouts)) - set().union(*map(wanted, found))
    while left:
        sample = random.sample(layouts, min(1500, len(layouts)))
        best = max(sample, key=lambda layout: len(wanted(layout) & left))
        if wanted(best) & left:
            found.append(best)
            left -= wanted(best)


def read() -> list[Layout]:
    with FILE.open() as file:
        rows = csv.DictReader(file)
        convert = {"sequence": lambda text: text == "True"} | dict.fromkeys(("context", "core", "recompute"), str)
        return [Layout(**{name: convert.get(name, int)(text) for name, text in row.items()}) for row in rows]


if __name__ == "__main__":
    with FILE.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(Layout._fields)
        writer.writerows(generate())
