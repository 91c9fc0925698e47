"""Draws Figures 6, 7 and 8 of arXiv:2501.19399: retrieval of a sentence from a long context."""

from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import pyplot as plt
from matplotlib.figure import Figure

from eval.checkpoint.drawing import COLOURS, STYLES, axes_of
from eval.papers.figures.results import label, of_runs

OUTCOMES = (("number", "o"), ("first digit", "^"), ("neither", "x"))


def heat_map(paths: list[Path]) -> Figure:
    """Draw Figure 6: the share of numbers found by depth and context length, one panel per run."""
    results = of_runs(paths, "needle")
    figure, row = plt.subplots(
        1, len(results), figsize=(1.2 + 4.2 * len(results), 3.6), layout="constrained", squeeze=False, sharey=True
    )
    for axes, result in zip(row[0], results, strict=True):
        cells = {(cell["length"], cell["depth"]): cell for cell in result["cells"]}
        lengths, depths = (sorted({key[axis] for key in cells}) for axis in (0, 1))
        shares = np.full((len(depths), len(lengths)), np.nan)
        for (length, depth), cell in cells.items():
            shares[depths.index(depth), lengths.index(length)] = cell["correct"] / cell["samples"]
        image = axes.imshow(shares, cmap="cividis", vmin=0, vmax=1, aspect="auto")
        for (y, x), share in np.ndenumerate(shares):
            if not np.isnan(share):
                axes.text(
                    x, y, f"{share:.2f}", ha="center", va="center", fontsize=8, color="black" if share > 0.5 else "w"
                )
        axes.set_xticks(range(len(lengths)), [f"{length:,}" for length in lengths], rotation=45, fontsize=9)
        axes.set_yticks(range(len(depths)), [f"{depth} %" for depth in depths], fontsize=9)
        axes.set_title(f"{label(result)}\n{result['cells'][0]['samples']} samples per cell", fontsize=10, loc="left")
        axes.set_xlabel("context (tokens)", fontsize=11)
    row[0][0].set_ylabel("depth of the needle", fontsize=11)
    figure.colorbar(image, ax=row, label="share of numbers found")
    return figure


def heads(paths: list[Path]) -> Figure:
    """Draw Figure 7: the needle score of every head on one prompt, in descending order."""
    results = of_runs(paths, "needle_scores")
    figure, axes = plt.subplots(figsize=(6.5, 4.2), layout="constrained")
    for index, result in enumerate(results):
        scores = sorted((score for layer in result["heads"]["scores"] for score in layer), reverse=True)
        style: dict[str, Any] = {"color": COLOURS[index % len(COLOURS)], "linestyle": STYLES[index % len(STYLES)]}
        axes.plot(range(1, len(scores) + 1), scores, **style, linewidth=1.8, marker=".", label=label(result))
    length, depth = results[0]["length"], results[0]["heads"]["depth"]
    title = f"Needle scores of all heads, {length:,} tokens, depth {depth} %"
    axes_of(figure, axes, title, "head, by rank", "attention to the number")
    axes.set_xscale("log")  # only few heads retrieve
    axes.xaxis.set_major_formatter("{x:.0f}")
    axes.set_ylim(bottom=0)
    axes.legend(fontsize=9, framealpha=1, edgecolor="none", loc="upper right")
    return figure


def top_heads(paths: list[Path]) -> Figure:
    """Draw Figure 8: the highest score of each trial in descending order, with the outcome of the answer."""
    results = of_runs(paths, "needle_scores")
    figure, axes = plt.subplots(figsize=(7.0, 4.6), layout="constrained")
    for index, result in enumerate(results):
        trials = sorted(result["trials"], key=lambda trial: -trial["top"])
        colour = COLOURS[index % len(COLOURS)]
        axes.plot(
            range(1, len(trials) + 1), [t["top"] for t in trials], color=colour, linewidth=0.8, label=label(result)
        )
        for outcome, marker in OUTCOMES:
            points = [(rank, t["top"]) for rank, t in enumerate(trials, 1) if t["outcome"] == outcome]
            if points:
                axes.plot(*zip(*points, strict=True), marker, color=colour, markersize=4.5, fillstyle="none")
    for outcome, marker in OUTCOMES:
        axes.plot([], [], marker, color="0.3", markersize=4.5, fillstyle="none", label=f"answered: {outcome}")
    title = f"Highest needle score of each trial, {results[0]['length']:,} tokens"
    axes_of(figure, axes, title, "trial, by rank", "attention to the number, highest of all heads")
    axes.set_ylim(bottom=0)
    axes.legend(fontsize=9, framealpha=1, edgecolor="none", loc="upper right")
    return figure
