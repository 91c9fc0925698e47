"""Draws Figures 3 and 4 of arXiv:2410.17980: multi-query repeated associative recall."""

from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import pyplot as plt
from matplotlib.figure import Figure

from eval.checkpoint.drawing import BASELINE, COLOURS, MARKERS, STYLES, axes_of
from eval.papers.figures.results import of_mqrar
from ssscale.errors import UserError

NAMES = {"softmax": "softmax + RoPE", "stickbreaking": "stick-breaking"}


def curve(folder: Path) -> Figure:
    """Draw the best model's accuracy by the number of pairs: at the end, and before training at full length."""
    results = of_mqrar(folder, "*-[0-9][0-9][0-9].json", f"python -m eval.papers.mqrar curve --out {folder}")
    figure, axes = plt.subplots(figsize=(6.5, 4.2), layout="constrained")
    for index, core in enumerate(sorted({result["core"] for result in results})):
        points = sorted((r["pairs"], r["best"]) for r in results if r["core"] == core)
        style: dict[str, Any] = {"color": COLOURS[index], "marker": MARKERS[index], "linestyle": STYLES[index]}
        axes.plot(*zip(*points, strict=True), **style, fillstyle="none", markersize=8, label=NAMES[core])
        early = [(r["pairs"], *found) for r in results if r["core"] == core and (found := before(r))]
        if early:
            pairs, accuracies, lengths = zip(*sorted(early), strict=True)
            label = f"{NAMES[core]}, trained on ≤ {max(lengths)} tokens"
            axes.plot(pairs, accuracies, **style, alpha=0.45, markersize=4, label=label)
    axes.set_xticks(sorted({result["pairs"] for result in results}))
    axes.set_ylim(-0.03, 1.03)
    first = results[0]
    title = f"MQRAR, {first['length']} tokens, width {first['width']}: the best of {len(first['lrs'])} learning rates"
    axes_of(figure, axes, title, "pairs of key and value", "share of questions answered")
    figure.legend(
        fontsize=9.5, edgecolor="none", loc="outside lower center", ncols=2
    )  # outside, because curves can be anywhere inside
    return figure


def before(result: dict[str, Any]) -> tuple[float, int] | None:
    """Return (accuracy, length) before training at full length, or None without such a test.

    accuracy: the best model's accuracy at the last test of the first stages. length: the longest sequence in them.
    """
    stages = result["short_first"]
    steps = sum(share for share, _, _ in stages) * result["steps"]
    tested = [max(entry["accuracy"]) for entry in result["history"] if entry["step"] <= steps]
    return (tested[-1], max(length for _, length, _ in stages)) if tested else None


def attention(folder: Path) -> Figure:
    """Draw the weights of both layers on one sequence. Markers show questions with a wrong answer."""
    results = of_mqrar(folder, "attention-*.json", f"python -m eval.papers.mqrar picture --out {folder}")
    results = [result for result in results if "weights" in result]
    if not results:
        raise UserError(
            f"{folder} has no picture yet: make it with `python -m eval.papers.mqrar picture --out {folder}`"
        )
    layers = len(results[0]["weights"])
    figure, panels = plt.subplots(
        len(results), layers, figsize=(6.6 * layers, 6.4 * len(results)), layout="constrained", squeeze=False
    )
    for row, result in zip(panels, results, strict=True):
        for layer, axes in enumerate(row):
            _picture(axes, result, layer)
    image = panels[0][0].images[0]
    figure.colorbar(image, ax=panels, shrink=0.5, label="attention weight")
    return figure


def _picture(axes: Any, result: dict[str, Any], layer: int) -> None:
    tokens = result["tokens"]
    axes.imshow(np.array(result["weights"][layer]), cmap="Blues", vmin=0, vmax=1, interpolation="nearest")
    at = range(len(tokens))
    axes.set_xticks(at, tokens, fontsize=6)
    axes.set_yticks(at, tokens, fontsize=6)
    answers = zip(result["queries"], result["answers"], result["found"], strict=True)
    wrong = [position for position, answer, found in answers if answer != found]
    if wrong:
        outside = [len(tokens) + 0.2] * len(wrong)
        axes.plot(outside, wrong, marker="<", color=COLOURS[1], linestyle="none", markersize=5, clip_on=False)
    axes.set_xlim(-0.5, len(tokens) - 0.5)
    right = len(result["queries"]) - len(wrong)
    axes.set_title(f"{result['name']}, layer {layer + 1}", fontsize=13, loc="left", color=BASELINE)
    axes.set_xlabel(f"key ({right} of {len(result['queries'])} questions answered; ◂ the others)", fontsize=11)
    axes.set_ylabel("query", fontsize=11)
