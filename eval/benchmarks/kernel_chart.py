"""Draws the figure of kernels/README.md from the tables that hold the measurements.

These are the tables "Measured" of kernels/stickbreaking/README.md and "decoding" of docs/results/attention_speed.md.
"""

import re
import sys
from pathlib import Path

from eval.checkpoint.command import sentences
from ssscale.errors import UserError
from ssscale.options import Command, Option

COMMAND = Command(
    about=__doc__,
    usage="python -m eval.benchmarks.kernel_chart out=FILE",
    example="python -m eval.benchmarks.kernel_chart out=kernels/speed.png",
    options=(Option("out", str, "the .png to write", metavar="FILE", required=True),),
)
ROOT = Path(__file__).resolve().parents[2]
OPERATORS = ROOT / "kernels" / "stickbreaking" / "README.md"
DECODING = ROOT / "docs" / "results" / "attention_speed.md"
# Equally many tokens in rows of two lengths.
SHAPES = {"4×24×4096×64": "4 × 4,096", "1×24×16384×64": "1 × 16,384"}
COLUMNS = ("FA2", "cuDNN", "authors'", "ours, dense", "ours, spent")
COLORS = {
    "FA2": "#9a9a9a",
    "cuDNN": "#5f5f5f",
    "authors'": "#c98a3a",
    "ours, dense": "#2f6fae",
    "ours, spent": "#8fc0e8",
}


def operators() -> dict[str, list[float]]:
    """Returns ms of forward and backward together, of each column, for each shape."""
    found = {}
    for line in OPERATORS.read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if cells[0] in SHAPES and len(cells) > len(COLUMNS):
            found[cells[0]] = [sum(map(float, cell.split("/"))) for cell in cells[1 : 1 + len(COLUMNS)]]
    return found


def decoding() -> list[tuple[int, list[float]]]:
    """Returns cache lengths, each with µs of dense, spent and SDPA at batch 32."""
    text = DECODING.read_text(encoding="utf-8").split("## Stick-breaking: decoding")[1].split("\n## ")[0]
    rows = re.findall(r"^\| ([\d,]+) \| [^|]+ \| ([^|]+) \|$", text, re.MULTILINE)
    return [(int(n.replace(",", "")), [float(x.replace(",", "")) for x in cell.split(", ")]) for n, cell in rows]


def draw(file: Path) -> None:
    import matplotlib as mpl

    mpl.use("agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(9.5, 3.4), layout="constrained")
    times = operators()
    width = 0.8 / len(COLUMNS)
    for i, name in enumerate(COLUMNS):
        places = [x + (i - (len(COLUMNS) - 1) / 2) * width for x in range(len(SHAPES))]
        heights = [times[shape][i] for shape in SHAPES]
        left.bar(places, heights, width, label=name, color=COLORS[name])
        for place, height in zip(places, heights):
            left.text(place, height, f"{height:.1f}", ha="center", va="bottom", fontsize=7)
    left.set_xticks(range(len(SHAPES)), [f"{label} tokens" for label in SHAPES.values()])
    left.set_ylabel("ms, forward and backward")
    left.set_title("Training, 24 heads of 64, bf16", fontsize=10)
    left.legend(fontsize=8, frameon=False)
    lengths, cells = zip(*decoding())
    for i, (name, color) in enumerate((("ours, dense", "#2f6fae"), ("ours, spent", "#8fc0e8"), ("SDPA", "#9a9a9a"))):
        right.plot(lengths, [row[i] for row in cells], marker="o", markersize=4, label=name, color=color)
    right.set(xscale="log", yscale="log", xlabel="tokens in the cache", ylabel="µs per call")
    right.set_xticks(lengths, [f"{n // 1024}K" for n in lengths])
    right.minorticks_off()
    right.set_title("Decoding, batch 32, 24 heads over 8, bf16", fontsize=10)
    right.legend(fontsize=8, frameon=False)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(file, dpi=110)


def main(argv: list[str]) -> None:
    options, _ = COMMAND.parse(argv)
    file = Path(options["out"])
    if file.suffix != ".png":
        raise UserError(f"out={file} must end in .png")
    if not file.parent.is_dir():
        raise UserError(f"out={file}: there is no folder {file.parent}")
    draw(file)


if __name__ == "__main__":
    with sentences(COMMAND):
        main(sys.argv[1:])
