"""Draws the loss beyond the training length.

By position, it is Figure 5 of arXiv:2501.19399. By context length, it is Figure 5 of arXiv:2410.17980.
"""

from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import pyplot as plt
from matplotlib.figure import Figure

from eval.checkpoint.drawing import COLOURS, MARKERS, STYLES, axes_of
from eval.papers.figures.results import label, of_runs
from ssscale.errors import UserError


def longest(result: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    """Return the longest length of a result and its entry."""
    length = max(int(text) for text in result["lengths"])
    return length, result["lengths"][str(length)]


def smoothed(losses: np.ndarray, reach: int = 2) -> np.ndarray:
    """Average each loss with up to `reach` neighbours on both sides, and with fewer near the ends."""
    sums = np.cumsum(np.concatenate([[0.0], losses]))
    at = np.arange(len(losses))
    near = np.minimum(np.minimum(at, len(losses) - 1 - at), reach)
    return (sums[at + near + 1] - sums[at - near]) / (2 * near + 1)


def check_same(results: list[dict[str, Any]], length: int) -> None:
    """Raise UserError if results were not measured on the same targets of a length: their means do not compare."""

    def measured(result: dict[str, Any]) -> dict[str, Any]:
        entry = result["lengths"][str(length)]
        of_texts = {key: result.get(key) for key in ("texts", "texts_sha256", "joined")}
        return of_texts | {key: entry.get(key) for key in ("windows", "targets")}

    first = measured(results[0])
    for result in results[1:]:
        for key, value in measured(result).items():
            if value != first[key]:
                a, b = label(results[0]), label(result)
                raise UserError(f"{a} and {b} do not compare: {key} is {first[key]} and {value} at {length:,} tokens")


def by_position(paths: list[Path]) -> Figure:
    """Draw the mean loss by position in the longest context."""
    results = of_runs(paths, "long_context")
    length, first = longest(results[0])
    if others := [result for result in results if longest(result)[0] != length]:
        raise UserError(
            f"the longest length of {label(others[0])} is not the {length:,} of {label(results[0])}: give both the same"
        )
    check_same(results, length)
    figure, axes = plt.subplots(figsize=(7.5, 4.6), layout="constrained")
    for index, result in enumerate(results):
        _, found = longest(result)
        losses = np.array(found["losses"]).mean(0)
        middle = (np.arange(len(losses)) + 0.5) * found["bin"]
        colour, style = COLOURS[index % len(COLOURS)], STYLES[index // len(COLOURS) % len(STYLES)]
        axes.plot(middle, losses, color=colour, linestyle=style, linewidth=0.6, alpha=0.35)
        axes.plot(middle, smoothed(losses), color=colour, linestyle=style, linewidth=1.8, label=label(result))
    for train_length in {result["train_length"] for result in results}:
        axes.axvline(train_length, color="0.4", linestyle=":", linewidth=1.2, label=f"trained on {train_length:,}")
    title = f"Loss by position, {first['windows']} windows of {length:,} tokens"
    axes_of(figure, axes, title, "position in the context (tokens)", "loss (nats per token)")
    axes.set_xscale("log")
    # Inside of the axes, the legend would hide the losses of the first positions.
    figure.legend(fontsize=9, edgecolor="none", loc="outside lower center", ncols=2)
    return figure


def by_context(paths: list[Path]) -> Figure:
    """Draw the mean loss of the same targets by context length."""
    return _means(of_runs(paths, "long_context"), "The same {:,} targets in contexts of growing length")


def of_articles(paths: list[Path]) -> Figure:
    """Draw the mean loss of all tokens by the length of the pieces in which each article is read by itself."""
    return _means(of_runs(paths, "articles"), "{:,} tokens, each article read by itself in pieces of growing length")


def _means(results: list[dict[str, Any]], title: str) -> Figure:
    figure, axes = plt.subplots(figsize=(7.5, 5.0), layout="constrained")
    shared = set.intersection(*(set(result["lengths"]) for result in results))
    if len(shared) < 2:
        raise UserError("the results share fewer than two lengths: give every run the same --lengths")
    lengths = sorted(int(text) for text in shared)
    check_same(results, lengths[-1])
    for index, result in enumerate(results):
        losses = [result["lengths"][str(length)]["mean"] for length in lengths]
        style: dict[str, Any] = {"color": COLOURS[index % len(COLOURS)], "marker": MARKERS[index % len(MARKERS)]}
        axes.plot(lengths, losses, **style, linestyle=STYLES[index // len(COLOURS)], label=label(result))
    axes.set_xscale("log", base=2)
    axes.set_xticks(lengths, [f"{length // 1024}K" if length % 1024 == 0 else str(length) for length in lengths])
    tokens = results[0]["lengths"][str(lengths[-1])]["targets"]
    axes_of(figure, axes, title.format(tokens), "context (tokens)", "loss (nats per token)")
    figure.legend(fontsize=9, edgecolor="none", loc="outside lower center", ncols=2)
    return figure
