"""Draws training losses (arXiv:2501.19399, Figure 4) and their differences."""

from pathlib import Path

import numpy as np
from matplotlib import pyplot as plt
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter

from eval.checkpoint.drawing import COLOURS, STYLES, axes_of
from eval.papers.figures.length import smoothed
from ssscale.errors import UserError

LAST = 0.1  # the legend shows the mean difference over this last share of the records


def losses(paths: list[Path]) -> Figure:
    """Draw the loss of each run by tokens, and below it the difference to the first run at the same tokens.

    Raises UserError for fewer than two runs, or if the runs have fewer than two token counts in common.
    """
    from eval.checkpoint.run import Run  # loads Megatron-core, which the other figures do not need

    if len(paths) < 2:
        raise UserError("training_losses compares runs; give the reference run first, then one or more others")
    runs = [Run.open(path) for path in paths]
    curves = [{record["tokens"]: record["loss"] for record in run.training} for run in runs]
    shared = np.array(sorted(set.intersection(*map(set, curves))))
    if len(shared) < 2:
        raise UserError(
            f"{', '.join(map(str, paths))} share fewer than two logged token counts: their steps differ in size"
        )
    figure, (above, below) = plt.subplots(
        2, 1, sharex=True, figsize=(7.5, 6.2), height_ratios=(3, 2), layout="constrained"
    )
    reach = max(1, len(shared) // 40)
    first = np.array([curves[0][tokens] for tokens in shared])
    for index, (run, curve) in enumerate(zip(runs, curves, strict=True)):
        style = {"color": COLOURS[index % len(COLOURS)], "linestyle": STYLES[index // len(COLOURS) % len(STYLES)]}
        found = np.array([curve[tokens] for tokens in shared])
        above.plot(shared, smoothed(found, reach), **style, linewidth=1.6, label=run.name)
        if index:
            apart = found - first
            last = apart[-max(1, int(LAST * len(apart))) :].mean()
            label = f"{run.name}: {last:+.4f} over the last {LAST:.0%}"
            below.plot(shared, apart, **style, linewidth=0.6, alpha=0.35)
            below.plot(shared, smoothed(apart, reach), **style, linewidth=1.8, label=label)
    below.axhline(0, color=COLOURS[0], linewidth=1.6)
    # Without the first steps, in which the loss falls by several nats and would dominate the scale.
    later = slice(len(shared) // 10, None)
    spread = np.concatenate([np.array([curve[t] for t in shared[later]]) - first[later] for curve in curves[1:]])
    below.set_ylim(min(0, spread.min()) - 0.01, max(0, spread.max()) + 0.01)
    above.set_ylim(top=first[later].max() + 1, bottom=min(min(curve[t] for t in shared) for curve in curves) - 0.1)
    axes_of(figure, above, "Training loss", "", "loss (nats per token)")
    axes_of(figure, below, f"Above {runs[0].name}", "training tokens", "difference (nats per token)")
    below.xaxis.set_major_formatter(EngFormatter(sep=""))
    for axes in (above, below):
        axes.legend(fontsize=9, framealpha=1, edgecolor="none", loc="upper right")
    return figure
