"""What all figures share. Importing this chooses matplotlib's backend that needs no display."""

from pathlib import Path

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

# Okabe and Ito's palette, told apart by colour-blind readers; black is the baseline's.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
BASELINE = "#000000"
# Beside the colours, so that lines are told apart in grey too.
STYLES = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)), (0, (1, 3)))
MARKERS = ("o", "s", "^", "D", "v", "P")
DPI = 150
SMALL_DPI = 110  # of figures that lie in docs/


def axes_of(figure: Figure, axes: Axes, title: str, x: str, y: str) -> None:
    """Title, labels with units, a faint grid."""
    axes.set_title(title, fontsize=12, loc="left")
    axes.set_xlabel(x, fontsize=11)
    axes.set_ylabel(y, fontsize=11)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)


def save(figure: Figure, file: Path) -> list[Path]:
    """FILE.png and FILE.pdf."""
    file.parent.mkdir(parents=True, exist_ok=True)
    files = [file.with_suffix(".png"), file.with_suffix(".pdf")]
    # The same data give the same bytes: no date in the PDF.
    figure.savefig(files[0], dpi=SMALL_DPI)
    figure.savefig(files[1], metadata={"CreationDate": None})
    plt.close(figure)
    return files
