"""Draws what a passage earlier in the context saves when the text repeats it (eval.papers.repeats)."""

from pathlib import Path
from typing import Any

from matplotlib import pyplot as plt
from matplotlib.figure import Figure

from eval.checkpoint.drawing import COLOURS, MARKERS, STYLES, axes_of
from eval.papers.figures.results import label, of_runs


def by_length(result: dict[str, Any]) -> dict[int, dict[str, float]]:
    """Return for each length the means over all depths: `loss`, `right`, and `saved`, the loss without minus `loss`.

    Losses are in nats per token, `right` is a share of tokens. Lengths that are not yet complete are left out.
    """
    found = {}
    for length in sorted({cell["length"] for cell in result["cells"]}):
        cells = [cell for cell in result["cells"] if cell["length"] == length]
        without = [cell["loss"] for cell in cells if cell["depth"] is None]
        with_it = [cell for cell in cells if cell["depth"] is not None]
        if without and with_it:
            loss, right = (sum(cell[key] for cell in with_it) / len(with_it) for key in ("loss", "right"))
            found[length] = {"loss": loss, "right": right, "saved": without[0] - loss}
    return found


def gain(paths: list[Path]) -> Figure:
    """Draw the nats per token that the passage saves, by context length."""
    results = of_runs(paths, "repeats")
    figure, axes = plt.subplots(figsize=(7.5, 5.0), layout="constrained")
    ticks: set[int] = set()
    for index, result in enumerate(results):
        means = by_length(result)
        ticks |= means.keys()
        style: dict[str, Any] = {"color": COLOURS[index % len(COLOURS)], "marker": MARKERS[index % len(MARKERS)]}
        saved = [means[length]["saved"] for length in means]
        axes.plot(
            list(means), saved, **style, linestyle=STYLES[index // len(COLOURS) % len(STYLES)], label=label(result)
        )
    for train_length in {result["train_length"] for result in results}:
        axes.axvline(train_length, color="0.4", linestyle=":", linewidth=1.2, label=f"trained on {train_length:,}")
    axes_of(figure, axes, "What a passage in the context saves", "context (tokens)", "nats saved per token")
    axes.set_xscale("log", base=2)
    axes.set_xticks(sorted(ticks), [f"{length:,}" for length in sorted(ticks)])
    axes.axhline(0, color="0.7", linewidth=0.8)
    figure.legend(fontsize=9, edgecolor="none", loc="outside lower center", ncols=2)
    return figure
