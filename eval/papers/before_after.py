"""Prints the results of runs side by side: the loss and the use of repeated passages, by context length.

    python -m eval.papers.before_after RUN [RUN ...]

The runs have results of eval.papers.long_context and eval.papers.repeats. The tables are Markdown. Each has one row per
run and set of changed keys, and one column per length that all of them have.
"""

import argparse
from pathlib import Path

from eval.checkpoint.command import Parser, sentences
from eval.papers.figures.repeats import by_length
from eval.papers.figures.results import label, of_runs

Rows = list[tuple[str, dict[int, float]]]


def table(title: str, rows: Rows) -> str:
    """Return a Markdown table of rows, (name, {length: value})."""
    lengths = sorted(set.intersection(*(set(values) for _, values in rows)))
    lines = [
        f"| {title} | " + " | ".join(f"{length:,}" for length in lengths) + " |",
        "|---" * (len(lengths) + 1) + "|",
    ]
    lines += [f"| {name} | " + " | ".join(f"{values[n]:.3f}" for n in lengths) + " |" for name, values in rows]
    return "\n".join(lines)


def tables(runs: list[Path]) -> list[str]:
    """Return the tables of all runs. Raises UserError if a run lacks results."""
    losses: Rows = []
    for result in of_runs(runs, "long_context"):
        losses.append((label(result), {int(length): found["mean"] for length, found in result["lengths"].items()}))
    found = [table("loss, nats per token", losses)]
    repeats = [(label(result), by_length(result)) for result in of_runs(runs, "repeats")]
    for key, title in (
        ("saved", "saved by a passage that is repeated, nats per token"),
        ("right", "share of its tokens that are predicted"),
    ):
        found.append(table(title, [(name, {n: means[n][key] for n in means}) for name, means in repeats]))
    return found


def main() -> None:
    parser = Parser(
        "python -m eval.papers.before_after", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", nargs="+", type=Path, help="run folders")
    arguments = parser.parse_args()
    with sentences():
        print("\n\n".join(tables(arguments.runs)))


if __name__ == "__main__":
    with sentences():
        main()
