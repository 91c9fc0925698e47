"""Draws the figures of the study `cores`, from the JSON files of eval.papers.study: means over seeds."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import pyplot as plt
from matplotlib.figure import Figure

from eval.checkpoint.drawing import axes_of
from eval.papers.figures import ruler
from eval.papers.figures.length import smoothed
from eval.papers.figures.studies import band, load, losses, needles, seeds_of, style
from eval.papers.study.whole import Results
from ssscale.errors import UserError

CORES = {"softmax": "softmax", "ssmax": "SSMax", "sb": "stick-breaking"}
KINDS = {"plain": "", "base": ", 50 × base"}  # of the loss by position


def target_of(results: Results) -> float:
    """Return the loss that every training reached: the highest of the last validation losses.

    Raises UserError without any.
    """
    last = [result["to_loss"][-1][2] for some in results.values() for result in some if result.get("to_loss")]
    if not last:
        raise UserError("there is no result with validation losses")
    return float(max(last))


def reached(curve: Sequence[Sequence[float]], target: float) -> tuple[float, float] | None:
    """Return (tokens, seconds) at which [tokens, seconds, loss] falls to the target, or None.

    Linear between two validations.
    """
    before: Sequence[float] | None = None
    for entry in curve:
        if entry[2] <= target:
            if before is None or before[2] == entry[2]:
                return entry[0], entry[1]
            share = (before[2] - target) / (before[2] - entry[2])
            tokens, seconds = (before[i] + share * (entry[i] - before[i]) for i in (0, 1))
            return tokens, seconds
        before = entry
    return None


def to_loss(folder: Path) -> Figure:
    """Draw the validation loss by seconds of training on one GPU, and the target with the times that it takes."""
    results = load(folder, "to_loss")
    target = target_of(results)
    figure, axes = plt.subplots(figsize=(7.5, 4.6), layout="constrained")
    top = target
    for index, (job, some) in enumerate(results.items()):
        took = [at[1] for result in some if (at := reached(result["to_loss"], target))]
        for number, result in enumerate(some):
            curve = np.array(result["to_loss"])
            label = f"{CORES[job]}: {np.mean(took):.0f} s" if not number else None
            axes.plot(curve[:, 1], curve[:, 2], **style(index), linewidth=1.8, label=label)
            top = max(top, float(curve[len(curve) // 5, 2]))
    axes.axhline(target, color="0.4", linestyle=":", linewidth=1.2, label=f"target {target:.3f}")
    lowest = min(entry[2] for some in results.values() for result in some for entry in result["to_loss"])
    axes.set_ylim(lowest - 0.05, top + 0.1)
    device = next(iter(results.values()))[0]["device"]
    title = f"Validation loss by training time, {device}, {seeds_of(results)}"
    axes_of(figure, axes, title, "seconds of training", "loss (nats per token)")
    axes.legend(fontsize=9, framealpha=1, edgecolor="none")
    return figure


def positions(folder: Path) -> Figure:
    """Draw the loss by position to ten times the training length, with and without RoPE's other base."""
    results = load(folder, "positions")
    figure, axes = plt.subplots(figsize=(7.5, 4.8), layout="constrained")
    every = [(job, kind) for job, some in results.items() for kind in KINDS if kind in some[0]["positions"]]
    drawn: list[float] = []
    for index, (job, kind) in enumerate(every):
        some = [result["positions"][kind] for result in results[job]]
        curves = np.array([smoothed(np.array(found["mean"])) for found in some])
        x = (np.arange(curves.shape[1]) + 0.5) * some[0]["bin"]
        band(axes, x, curves, index, CORES[job] + KINDS[kind])
        drawn += curves.mean(0)[x <= some[0]["train_length"]].tolist()
    first = results[every[0][0]][0]["positions"][every[0][1]]
    axes.axvline(first["train_length"], color="0.4", linestyle=":", linewidth=1.2, label="training length")
    title = f"Loss by position, {first['windows']} windows, {seeds_of(results)}"
    axes_of(figure, axes, title, "position in the context (tokens)", "loss (nats per token)")
    axes.set_ylim(min(drawn) - 0.3, max(drawn) + 0.5)  # RoPE as trained leaves the figure
    axes.legend(fontsize=8, framealpha=1, edgecolor="none")
    return figure


def scores(folder: Path) -> Figure:
    """Draw RULER's scores by length (arXiv:2410.17980, Figure 6)."""
    results = load(folder, "ruler")
    found: dict[str, list[Any]] = {}
    for job, some in results.items():
        found[CORES[job.partition("+")[0]]] = [
            {name: (value, stderr) for name, (value, stderr) in result["ruler"].items()} for result in some
        ]
    return ruler.draw(found)


# name of a figure → (key that results need, function)
FIGURES: dict[str, tuple[str, Callable[[Path], Figure]]] = {
    "losses": ("training", losses),
    "to_loss": ("to_loss", to_loss),
    "positions": ("positions", positions),
    "needles": ("needle", needles),
    "ruler": ("ruler", scores),
}
