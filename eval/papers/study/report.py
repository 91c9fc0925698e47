"""Draws a study's figures and writes its claims with their verdicts."""

import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from statistics import fmean
from typing import Any

from matplotlib.figure import Figure

from eval.checkpoint.drawing import save
from eval.papers.figures import cores, studies, variations
from eval.papers.mqrar.recipe import LEARNING_RATES
from eval.papers.study.claims import CLAIMS, Claim, training_loss
from eval.papers.study.cores_report import claims, summary
from eval.papers.study.rates import FILE
from eval.papers.study.whole import Results, method_of, read_results, validation
from ssscale.errors import UserError
from ssscale.json_object import read_json

# study → name of a figure → (key that results need, function, which returns None where there is nothing to compare)
FIGURES: dict[str, Mapping[str, tuple[str, Callable[[Path], Figure | None]]]] = {
    "ssmax": {
        "losses": ("training", studies.losses),
        "same_rate": ("training", studies.same_rate),
        "by_position": ("by_position", studies.by_position),
        "needles": ("needle", studies.needles),
        "heads": ("needle", studies.heads),
        "p_n": ("pn", studies.factors),
    },
    "positions": {
        "losses": ("training", studies.losses),
        "same_rate": ("training", studies.same_rate),
        "contexts": ("books", studies.contexts),
    },
    "why": {"apart": ("books", variations.apart), "contexts": ("books", studies.contexts)},
    "cores": cores.FIGURES,
    "mqrar": {"recall": ("mqrar", variations.by_step)},
}


def claims_of(name: str, results: Results) -> list[Claim]:
    """Return the claims that a study touches."""
    return claims(results) if name == "cores" else CLAIMS[name]()


def results_of(folder: Path) -> Results:
    """Return all results of a study by job. Raises UserError if there are none."""
    found = read_results(folder)
    if not found:
        raise UserError(f"{folder} has no results: make them with `python -m eval.papers.study {folder.name}`")
    return found


def short(commit: str) -> str:
    """Return a commit of 40 hexadecimal digits by its first seven, and any other name as it is."""
    return commit[:7] if re.fullmatch("[0-9a-f]{40}", commit) else commit


def record(name: str, results: Results) -> str:
    """Return the line that docs/results requires after a table or a picture."""
    every = [result for some in results.values() for result in some]

    def each(key: str, of: Callable[[str], str] = str) -> str:
        return ", ".join(sorted({of(str(result[key])) for result in every}))

    seeds = ", ".join(str(seed) for seed in sorted({result["seed"] for result in every}))
    date = max(str(result["date"]) for result in every)
    command = f"python -m eval.papers.study {name} --seeds {seeds.replace(' ', '')}"
    return f"Command: `{command}` · Commit: {each('commit', short)} · Machine: {each('device')} · Date: {date}"


def minutes(results: Results) -> str:
    """Return a table of the minutes that every job's steps took."""
    lines = ["| job | seed | minutes by step (jobs on its GPU) |", "|---|---|---|"]
    for job, some in results.items():
        for result in some:
            took: dict[str, Any] = result["seconds"]
            steps = ", ".join(f"{step} {seconds / 60:.1f} ({jobs})" for step, (seconds, jobs) in took.items())
            lines.append(f"| {job} | {result['seed']} | {steps} |")
    return "\n".join(lines)


def rates(folder: Path) -> str:
    """Return a table of the learning rates, the chosen one in bold, or nothing without a choice.

    MQRAR numbers its rates.
    """
    file = folder / FILE
    if not file.is_file():
        return ""
    lines = ["| method | validation loss by learning rate |", "|---|---|"]
    for method, entry in read_json(file).items():
        cells = []
        for rate, loss in entry["losses"].items():
            shown = f"{LEARNING_RATES[int(rate) - 1]:.2g}" if folder.name == "mqrar" else rate
            cell = f"{shown}: {'NaN' if loss is None else format(loss, '.4f')}"
            cells.append(f"**{cell}**" if float(rate) == entry["rate"] else cell)
        lines.append(f"| {method} | {', '.join(cells)} |")
    return "\n".join(lines)


def whole(results: Results) -> str:
    """Return a table of whole trainings at several learning rates, the one that stands for its method in bold, or nothing."""
    methods: dict[str, dict[float, str]] = {}
    for job, (first, *_) in results.items():
        if (loss := validation(first)) is not None:
            cell = f"{first['rate']:g}: {loss:.4f}"
            methods.setdefault(method_of(job), {})[first["rate"]] = cell if "@" in job else f"**{cell}**"
    several = {method: cells for method, cells in methods.items() if len(cells) > 1}
    if not several:
        return ""
    lines = ["| method | validation loss of the whole training by learning rate, seed 0 |", "|---|---|"]
    lines += [f"| {method} | {', '.join(cells[rate] for rate in sorted(cells))} |" for method, cells in several.items()]
    return "\n".join(lines)


def losses(results: Results) -> str:
    """Return a table of the losses in the shortest and the longest context, or nothing without any. Mean over seeds."""
    by_key = {key: studies.context_losses(results, key) for key in ("books", "articles")}
    lines = []
    for job in by_key["books"]:
        plain = next(name for name in (job, job.removesuffix("-ntk"), job.removesuffix("-window")) if name in results)
        some = results[plain]
        name = studies.name_of(re.sub(r"@[^-+]+", "", job))
        cells = [name, f"{some[0]['rate']:g}", _mean(map(training_loss, some)), _mean(map(validation, some))]
        for found in by_key.values():
            for choose in (min, max):
                cells.append(_mean(of_seed[choose(of_seed)] for of_seed in found.get(job, [])))
        lines.append(f"| {' | '.join(cells)} |")
    head = "| method | rate | training loss, last 10 % | validation loss | books, shortest context | books, longest |"
    head += " articles, shortest | articles, longest |"
    return "\n".join([head, "|---|---|---|---|---|---|---|---|", *lines]) if lines else ""


def _mean(values: Iterable[float | None]) -> str:
    found = [value for value in values if value is not None]
    return f"{fmean(found):.3f}" if found else ""


def report(name: str, out: Path, to: Path) -> list[Path]:
    """Write TO/NAME.md and the figures TO/NAME/*.png. Returns the files.

    Raises UserError if the study has no results.
    """
    folder = out / name
    results = results_of(folder)
    shown = variations.together(folder) if name == "why" else results
    line = record(name, shown)
    parts = [f"# {name}: figures and claims", f"Written by `python -m eval.papers.study {name} --report`."]
    if name == "cores" and (tables := summary(results)):
        parts += [tables, line]
    files = []
    for figure, (key, draw) in FIGURES[name].items():
        drawn = draw(folder) if studies.has(folder, key) else None
        if drawn is not None:
            png, pdf = save(drawn, to / name / figure)
            pdf.unlink()
            files.append(png)
            parts += [f"![{figure}]({name}/{figure}.png)", line]
    if table := losses(shown):
        parts += ["## Losses by context", table, line]
    rows = [row for claim in claims_of(name, results) if (row := claim.row(results)) is not None]
    if rows:
        head = ["| claim | measure | expected lower | expected higher | verdict |", "|---|---|---|---|---|"]
        text = "A verdict compares the ranges over seeds: `holds` and `does not hold here` mean that they are apart."
        parts += ["## Claims", text, "\n".join([*head, *rows]), line]
    if table := rates(folder):
        parts += [
            f"## Learning rates, chosen on {'32 pairs' if name == 'mqrar' else 'validation documents'}",
            table,
            line,
        ]
    if table := whole(results):
        parts += ["## Whole trainings at two learning rates", table, line]
    parts += ["## Minutes", minutes(results), line]
    page = to / f"{name}.md"
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text("\n\n".join(parts) + "\n", encoding="utf-8")
    return [page, *files]
