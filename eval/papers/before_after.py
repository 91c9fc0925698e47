"""Prints the results of runs side by side: the loss and the use of repeated passages, by context length.

    python -m eval.papers.before_after RUN [RUN ...]

The runs have results of eval.papers.long_context and eval.papers.repeats. The tables are Markdown. Each has one row per
run and set of changed keys, and one column per length that all of them have.
"""

import argparse
from pathlib import Path
from typing import Any

from eval.checkpoint.command import sentences
from eval.papers.figures.repeats import by_length
from eval.papers.figures.results import label, of_runs


def table(title: str, rows: dict[str, dict[int, float]], digits: int) -> str:
    """Return a Markdown table of {row: {length: value}}."""
    lengths = sorted(set.intersection(*(set(row) for row in rows.values())))
    lines = [
        f"| {title} | " + " | ".join(f"{length:,}" for length in lengths) + " |",
        "|---" * (len(lengths) + 1) + "|",
    ]
    lines += [f"| {name} | " + " | ".join(f"{row[n]:.{digits}f}" for n in lengths) + " |" for name, row in rows.items()]
    return "\n".join(lines)


def tables(runs: list[Path]) -> list[str]:
    """Return the tables of all runs. Raises UserError if a run lacks results."""
    losses: dict[str, dict[int, float]] = {}
    for result in of_runs(runs, "long_context"):
        losses[label(result)] = {int(length): found["mean"] for length, found in result["lengths"].items()}
    repeats: dict[str, dict[int, Any]] = {label(result): by_length(result) for result in of_runs(runs, "repeats")}
    found = [table("loss, nats per token", losses, 3)]
    for key, title, digits in (
        ("saved", "saved by a passage that is repeated, nats per token", 3),
        ("right", "share of its tokens that are predicted", 3),
    ):
        found.append(table(title, {name: {n: row[n][key] for n in row} for name, row in repeats.items()}, digits))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, help="run folders")
    arguments = parser.parse_args()
    with sentences():
        print("\n\n".join(tables(arguments.runs)))


if __name__ == "__main__":
    with sentences():
        main()
