"""Draws Figures 1 and 3 of arXiv:2501.19399: the outputs of softmax and SSMax for one vector. They need no model."""

import numpy as np
from matplotlib import pyplot as plt
from matplotlib.figure import Figure

from eval.checkpoint.drawing import COLOURS, STYLES, axes_of

FADING_SCALE = 0.43
SIZES = (10, 100, 1_000, 10_000)
SCALES = (0.5, 1.0)


def largest(z: np.ndarray, s: float | None = None) -> float:
    """Return the largest output of softmax (s=None, Eq. 1) or of SSMax, softmax(s ln n · z) (Eq. 2). z: [n]."""
    z = z if s is None else s * np.log(len(z)) * z
    return float(1 / np.exp(z - z.max()).sum())


def fading_vector(n: int) -> np.ndarray:
    """Return a vector [n] of −2, with +3 as its last entry."""
    z = np.full(n, -2.0)
    z[-1] = 3.0
    return z


def output_of_last(n: int, last: np.ndarray, s: float | None = None) -> np.ndarray:
    """Return the last output of softmax or SSMax for the vector (0, 1/(n−2), 2/(n−2), …, 1, z_max).

    last: the values of z_max. The result has the same shape.
    """
    factor = 1.0 if s is None else s * np.log(n)
    others = factor * np.linspace(0, 1, n - 1)
    log_others = others.max() + np.log(np.exp(others - others.max()).sum())
    return 1 / (1 + np.exp(np.clip(log_others - factor * last, -700, 700)))


def fading() -> Figure:
    """Draw Figure 1."""
    figure, axes = plt.subplots(figsize=(6.5, 4.2), layout="constrained")
    sizes = np.unique(np.logspace(0.31, 5, 60).astype(int))
    for index, (name, s) in enumerate((("softmax", None), (f"SSMax, s = {FADING_SCALE}", FADING_SCALE))):
        values = [largest(fading_vector(n), s) for n in sizes]
        axes.plot(sizes, values, color=COLOURS[index], linestyle=STYLES[index], linewidth=2, label=name)
    axes.set_xscale("log")
    axes.set_ylim(0, 1.02)
    axes_of(figure, axes, "Attention fading: −2 everywhere, +3 once", "n, size of the vector", "largest output")
    axes.legend(fontsize=10, framealpha=1, edgecolor="none", loc="lower left")
    return figure


def threshold() -> Figure:
    """Draw Figure 3. The paper gives neither n nor s, and the vector as printed has n + 2 entries."""
    figure, axes = plt.subplots(figsize=(7.5, 4.6), layout="constrained")
    last = np.linspace(0, 14, 700)
    for colour, s in zip(COLOURS, (None, *SCALES), strict=False):
        for style, n in zip(STYLES, SIZES, strict=False):
            name = "softmax" if s is None else f"SSMax, s = {s:g}"
            axes.plot(last, output_of_last(n, last, s), color=colour, linestyle=style, label=f"{name}, n = {n:,}")
    axes_of(
        figure,
        axes,
        "Where the largest input takes the attention",
        "$z_{max}$, the others lie between 0 and 1",
        "output for $z_{max}$",
    )
    axes.legend(fontsize=9, framealpha=1, edgecolor="none", loc="center left", bbox_to_anchor=(1.0, 0.5))
    return figure
