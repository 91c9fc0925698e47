"""Draws RULER's scores by length (arXiv:2410.17980, Figure 6): all tasks, needles, and the tracking of variables."""

from collections.abc import Mapping
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
from matplotlib import pyplot as plt
from matplotlib.figure import Figure

from eval.checkpoint.chance import Z
from eval.checkpoint.drawing import COLOURS, MARKERS, axes_of
from eval.checkpoint.ruler import TASKS
from ssscale.errors import UserError
from ssscale.json_object import read_json

Cell = tuple[float, float | None]  # score from 0 to 1, standard error
PANELS = {
    "all": ("Mean of the tasks", TASKS),
    "needles": ("Needles", tuple(task for task in TASKS if task.startswith("niah"))),
    "tracking": ("Variable tracking", ("ruler_vt",)),
}
COMMAND = "python launch/evaluate.py checkpoint=RUN suite=ruler lengths=2048,4096"


def cells_of(results: Mapping[str, Any]) -> dict[str, Cell]:
    """Return {TASK@LENGTH: (score, standard error)} of a results file."""
    found = {name: task for name, task in results.get("tasks", {}).items() if "@" in name}
    return {name: (task["value"], task["stderr"]) for name, task in found.items()}


def by_length(cells: Mapping[str, Cell], panel: str) -> dict[int, tuple[float, float]]:
    """Return {length: (mean over the panel's tasks, half of its 95 % interval)}.

    The standard error of a mean over k tasks is √Σ se² / k. A length without one of the tasks that others have is left
    out.
    """
    tasks = [task for task in PANELS[panel][1] if any(name.partition("@")[0] == task for name in cells)]
    found = {}
    for length in sorted({int(name.partition("@")[2]) for name in cells}):
        some = [cells[name] for task in tasks if (name := f"{task}@{length}") in cells]
        if some and len(some) == len(tasks):
            errors = [stderr or 0.0 for _, stderr in some]
            half = Z * sum(error**2 for error in errors) ** 0.5 / len(some)
            found[length] = fmean(value for value, _ in some), half
    return found


def results_of(paths: list[Path]) -> dict[str, dict[str, Cell]]:
    """Return {run and its settings: cells} of run folders, the newest of each of their evaluations, and of files.

    Raises UserError without a run, and for one without RULER's results.
    """
    if not paths:
        raise UserError(f"no run is given; give run folders, or files that `{COMMAND}` has made")
    found: dict[str, dict[str, Cell]] = {}
    for path in paths:
        files = [path] if path.is_file() else sorted((path / "eval").rglob("step-*.json"))
        named = {}
        for file in files:
            if cells := cells_of(read_json(file)):
                settings = "" if path.is_file() or file.parent == path / "eval" else f" ({file.parent.name})"
                named[f"{path.resolve().stem}{settings}"] = cells
        if not named:
            raise UserError(f"{path} has no results of RULER: make them with `{COMMAND}`")
        found |= named
    return found


def draw(found: Mapping[str, list[Mapping[str, Cell]]]) -> Figure:
    """Draw one curve per name with 95 % intervals. Several results of a name, such as seeds, are averaged."""
    figure, row = plt.subplots(1, len(PANELS), figsize=(13.5, 4.4), layout="constrained", sharey=True)
    for axes, (panel, (title, _)) in zip(row, PANELS.items(), strict=True):
        ticks: set[int] = set()
        for index, (name, several) in enumerate(found.items()):
            curves = [by_length(cells, panel) for cells in several]
            lengths = sorted(set.intersection(*map(set, curves)))
            ticks |= set(lengths)
            mean = np.array([fmean(curve[n][0] for curve in curves) for n in lengths])
            half = np.array([sum(curve[n][1] ** 2 for curve in curves) ** 0.5 / len(curves) for n in lengths])
            look = {"color": COLOURS[index % len(COLOURS)], "marker": MARKERS[index % len(MARKERS)]}
            axes.errorbar(lengths, mean, half, label=name, capsize=3, linewidth=1.8, markersize=5, **look)
        axes.set_xscale("log", base=2)
        axes.minorticks_off()
        axes.set_xticks(sorted(ticks), [f"{n // 1024}K" if n % 1024 == 0 else f"{n:,}" for n in sorted(ticks)])
        axes_of(figure, axes, title, "length (tokens)", "score" if panel == "all" else "")
        axes.set_ylim(bottom=0)
    row[0].legend(fontsize=8, framealpha=1, edgecolor="none")
    return figure


def scores(paths: list[Path]) -> Figure:
    """Draw the results of runs and files."""
    return draw({name: [cells] for name, cells in results_of(paths).items()})
