"""The evaluation suite of the stick-breaking paper (arXiv:2410.17980), and its Tables 2 to 4 with our model added."""

from collections.abc import Mapping
from statistics import fmean
from typing import Any

from rich.box import ASCII
from rich.console import Console
from rich.table import Table

from eval.checkpoint.chance import against_chance, interval

# (task, metric, heading) of Table 2: normalised accuracies first, then accuracies. Word perplexity is its last column.
TABLE_2 = [
    ("arc_challenge", "acc_norm,none", "ARC-c"),
    ("arc_easy", "acc_norm,none", "ARC-e"),
    ("hellaswag", "acc_norm,none", "Hella."),
    ("openbookqa", "acc_norm,none", "OBQA"),
    ("piqa", "acc_norm,none", "PIQA"),
    ("race", "acc,none", "RACE"),
    ("sciq", "acc,none", "SciQ"),
    ("winogrande", "acc,none", "Wino."),
]
PERPLEXITY = ("wikitext", "word_perplexity,none", "Wiki ppl")
TABLE_3 = [("mmlu", "acc,none", "0-shot"), ("mmlu_5shot", "acc,none", "5-shot")]
TABLE_4 = [
    ("gsm8k", "exact_match,strict-match", "5-shot"),
    ("gsm8k_cot", "exact_match,strict-match", "8-shot, CoT"),
]
SUITE = [task for task, _, _ in (*TABLE_2, PERPLEXITY, *TABLE_3, *TABLE_4)]

# Rows as the paper prints them. The last two columns of Table 2 are the average and the perplexity.
PAPER_2 = {
    "1B softmax": (35.8, 65.6, 64.8, 38.8, 75.0, 36.5, 90.5, 63.4, 58.8, 13.8),
    "1B stick-breaking": (37.7, 67.6, 65.4, 36.6, 76.0, 37.4, 91.9, 63.1, 59.5, 13.4),
    "3B softmax": (42.2, 73.1, 73.2, 40.8, 78.8, 37.4, 93.5, 67.6, 63.3, 11.3),
    "3B stick-breaking": (44.9, 74.3, 74.1, 40.4, 79.7, 37.8, 93.9, 68.0, 64.1, 10.8),
    "Gemma2-2B": (50.0, 80.2, 72.9, 41.8, 79.2, 37.3, 95.8, 68.8, 65.8, 13.1),
    "Qwen1.5-4B": (39.6, 61.5, 71.4, 40.0, 77.0, 38.2, 90.0, 68.1, 60.7, 12.5),
}
PAPER_3 = {
    "1B softmax": (25.7, 25.2),
    "1B stick-breaking": (28.4, 29.3),
    "TinyLlama": (25.3, 26.0),
    "3B softmax": (46.1, 49.1),
    "3B stick-breaking": (50.8, 52.9),
    "Gemma2-2B": (49.3, 53.1),
    "Qwen1.5-4B": (54.2, 55.2),
}
PAPER_4 = {"3B softmax": (44.1, 44.2), "3B stick-breaking": (42.3, 49.7)}

Row = tuple[float | None, ...]


def our_rows(tasks: Mapping[str, Mapping[str, Any]]) -> tuple[Row, Row, Row]:
    """Return this model's rows of the three tables, in percent except for the perplexity.

    A value is None if its task was not run. tasks: metrics by task.
    """

    def value(task: str, metric: str) -> float | None:
        found = tasks.get(task, {}).get(metric)  # a task of the user with this name may have other metrics
        return None if found is None else float(found)

    def percent(columns: list[tuple[str, str, str]]) -> list[float | None]:
        found = [value(task, metric) for task, metric, _ in columns]
        return [None if x is None else 100 * x for x in found]

    accuracies = percent(TABLE_2)
    known = [x for x in accuracies if x is not None]
    average = fmean(known) if len(known) == len(accuracies) else None
    return (*accuracies, average, value(*PERPLEXITY[:2])), tuple(percent(TABLE_3)), tuple(percent(TABLE_4))


def chance_rows(results: Mapping[str, Mapping[str, Any]]) -> list[tuple[tuple[str, ...], ...]]:
    """Return, for each table, rows of the 95 % intervals, of chance, and of whether the intervals exclude it.

    Rates are in percent. results: the "tasks" entry of a results file.
    """
    rows = []
    for columns in ([*TABLE_2, None, PERPLEXITY], TABLE_3, TABLE_4):
        cells = []
        for column in columns:
            result = None if column is None else results.get(column[0])
            share = column is not None and column != PERPLEXITY
            cells.append(_cells(result, column[1], share) if column and result else ("–", "–", "–"))
        rows.append(tuple(zip(*cells, strict=True)))
    return rows


def _cells(result: Mapping[str, Any], metric: str, share: bool) -> tuple[str, str, str]:
    value, name = result["metrics"].get(metric), metric.partition(",")[0]
    if value is None:
        return "–", "–", "–"
    stderr = result["metrics"].get(metric.replace(",", "_stderr,"))
    found = interval(name, value, stderr if isinstance(stderr, int | float) else None, result["items"])
    chance = result["chance"] if share else None
    times = 100 if share else 1
    shown = "–" if found is None else f"{times * found[0]:,.1f}–{times * found[1]:,.1f}"
    rate = "–" if chance is None else f"{100 * chance:.1f}"
    return shown, rate, against_chance(found, chance) or "–"


def paper_tables(results: Mapping[str, Mapping[str, Any]], name: str) -> list[Table]:
    """Return Tables 2 to 4 with this model, its 95 % intervals and chance as the last rows.

    results: the "tasks" entry of a results file. name: the model's row label.
    """
    tasks = {task: found["metrics"] for task, found in results.items()}
    headings = [
        [*(heading for _, _, heading in TABLE_2), "Avg", PERPLEXITY[2]],
        [heading for _, _, heading in TABLE_3],
        [heading for _, _, heading in TABLE_4],
    ]
    titles = [
        "Table 2: accuracy (normalised for ARC to PIQA) and Wikitext word perplexity",
        "Table 3: MMLU",
        "Table 4: GSM8K",
    ]
    tables = []
    papers: list[dict[str, Any]] = [PAPER_2, PAPER_3, PAPER_4]
    every = zip(titles, headings, papers, our_rows(tasks), chance_rows(results), strict=True)
    for title, columns, paper, ours, chance in every:
        table = Table(title=f"{title} (arXiv:2410.17980)", box=ASCII, title_justify="left")
        table.add_column("model", no_wrap=True)
        for column in columns:
            table.add_column(column, justify="right", no_wrap=True)
        for row, values in paper.items():
            table.add_row(row, *(f"{x:.1f}" for x in values))
        table.add_section()
        table.add_row(name, *("–" if x is None else f"{x:,.1f}" for x in ours))
        for label, cells in zip(("95 % interval", "chance", "excludes chance"), chance, strict=True):
            table.add_row(label, *cells)
        tables.append(table)
    return tables


def show_paper(tasks: Mapping[str, Mapping[str, Any]], name: str, console: Console) -> None:
    """Print `paper_tables` for the "tasks" entry of a results file."""
    wide = Console(width=max(console.width, 150), markup=False, emoji=False)  # a narrower console cuts Table 2
    for table in paper_tables(tasks, name):
        wide.print(table)
