"""Colours, styles and functions that all figures share. Its import selects a matplotlib backend without display."""

from pathlib import Path

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ssscale.train.files import replacing

# The palette of Okabe and Ito, which colour-blind readers can distinguish. Baselines are black.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
BASELINE = "#000000"
# Used in addition to colours, so that lines can be distinguished in grey.
STYLES = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)), (0, (1, 3)))
MARKERS = ("o", "s", "^", "D", "v", "P")
DPI = 150
SMALL_DPI = 110  # for figures in docs/


def axes_of(figure: Figure, axes: Axes, title: str, x: str, y: str) -> None:
    """Set title, axis labels and a faint grid. x, y: labels with units."""
    axes.set_title(title, fontsize=12, loc="left")
    axes.set_xlabel(x, fontsize=11)
    axes.set_ylabel(y, fontsize=11)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)


def save(figure: Figure, file: Path) -> list[Path]:
    """Write FILE.png and FILE.pdf, and close the figure. Returns both paths."""
    file.parent.mkdir(parents=True, exist_ok=True)
    files = [file.with_suffix(".png"), file.with_suffix(".pdf")]
    # No date in the PDF, so that the same data give the same bytes.
    with replacing(files[0]) as temporary:
        figure.savefig(temporary, dpi=SMALL_DPI)
    with replacing(files[1]) as temporary:
        figure.savefig(temporary, metadata={"CreationDate": None})
    plt.close(figure)
    return files
