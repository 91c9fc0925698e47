"""Draws the loss curves of one or several runs."""

from collections.abc import Sequence
from pathlib import Path

from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.ticker import EngFormatter

from eval.checkpoint.drawing import BASELINE, COLOURS, DPI
from eval.checkpoint.run import Run
from ssscale.train.files import replacing

SIZE = (9.0, 6.5)


def draw_run(run: Run, file: Path) -> None:
    """Draw training loss, validation loss and bigram by training tokens, and the learning rate below. Marks stages."""
    figure, (losses, rates) = _panels()
    tokens = [record["tokens"] for record in run.training]
    losses.plot(tokens, [record["loss"] for record in run.training], color=COLOURS[0], linewidth=1.4, label="training")
    if run.validation:
        points = [record["tokens"] for record in run.validation], [record["valid_loss"] for record in run.validation]
        losses.plot(*points, color=COLOURS[1], marker="o", markersize=5, linestyle="none", label="validation")
    if run.bigram is not None:
        label = f"Kneser–Ney bigram, validation ({run.bigram:.2f})"
        losses.axhline(run.bigram, color=BASELINE, linestyle="--", linewidth=1.2, label=label)
    rates.plot(tokens, [record["lr"] for record in run.training], color=COLOURS[2], linewidth=1.4)
    for start, name in run.stage_starts:
        for axes in (losses, rates):
            axes.axvline(start, color="0.4", linestyle=":", linewidth=1.2)
        # Text above the axes covers neither the curve nor the legend.
        at = losses.get_xaxis_transform()
        losses.text(start, 1.01, f"{name} stage", transform=at, va="bottom", ha="left", color="0.25", fontsize=10)
    _finish(figure, losses, rates, f"{run.name}: loss by training tokens", file)


def draw_runs(runs: Sequence[Run], file: Path) -> None:
    """Draw several runs in one figure: training as thin lines, validation with markers, one bigram per data set."""
    figure, (losses, rates) = _panels()
    for index, run in enumerate(runs):
        colour = COLOURS[index % len(COLOURS)]
        style = ("-", "--", "-.", ":")[index // len(COLOURS) % 4]
        tokens = [record["tokens"] for record in run.training]
        label = None if run.validation else run.name
        losses.plot(
            tokens,
            [r["loss"] for r in run.training],
            color=colour,
            linestyle=style,
            linewidth=0.8,
            alpha=0.5,
            label=label,
        )
        if run.validation:
            points = (
                [record["tokens"] for record in run.validation],
                [record["valid_loss"] for record in run.validation],
            )
            losses.plot(*points, color=colour, linestyle=style, marker="o", markersize=4, label=run.name)
        rates.plot(tokens, [record["lr"] for record in run.training], color=colour, linestyle=style, linewidth=1.4)
    for value in sorted({round(run.bigram, 4) for run in runs if run.bigram is not None}):
        label = f"Kneser–Ney bigram ({value:.2f})"
        losses.axhline(value, color=BASELINE, linestyle="--", linewidth=1.2, label=label)
    _finish(figure, losses, rates, "Loss by training tokens: training thin, validation with points", file)


def _panels() -> tuple[plt.Figure, tuple[Axes, Axes]]:
    figure, (losses, rates) = plt.subplots(2, 1, sharex=True, figsize=SIZE, height_ratios=(3, 1), layout="constrained")
    losses.set_ylabel("loss (nats per token)", fontsize=11)
    rates.set_ylabel("learning rate", fontsize=11)
    rates.set_xlabel("training tokens", fontsize=11)
    rates.xaxis.set_major_formatter(EngFormatter(sep=""))
    for axes in (losses, rates):
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    return figure, (losses, rates)


def _finish(figure: plt.Figure, losses: Axes, rates: Axes, title: str, file: Path) -> None:
    rates.set_ylim(bottom=0)
    rates.set_xlim(left=0)
    losses.set_title(title, fontsize=13, loc="left", pad=22)
    losses.legend(fontsize=10, framealpha=1, edgecolor="none", loc="upper right")
    with replacing(file) as temporary:
        figure.savefig(temporary, dpi=DPI, format="png")
    plt.close(figure)
