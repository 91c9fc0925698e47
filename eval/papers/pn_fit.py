"""Tests whether the learned p_n is logarithmic, as in the p_n study of arXiv:2501.19399 (Eq. 3, Figure 2).

    python -m eval.papers.pn_fit RUN [--figure FILE.png] [--json FILE.json] [--data FOLDER]

RUN is the folder of a run of launch/pretrain.py with `model.mixer.ssmax.variant=pn`. The command fits
p_n ≈ a1 · ln n + a2 by least squares. Each n is weighted by the number of training targets whose query sees n keys. The
command prints a1, a2 and R², and draws p_n with the fit. --json writes both to a file.
"""

import argparse
from pathlib import Path
from typing import NamedTuple

import numpy as np

from eval.checkpoint.command import Parser, sentences, write
from eval.checkpoint.run import Run
from ssscale.errors import UserError

PN = "shared.ssmax.pn"


class Fit(NamedTuple):
    """p_n ≈ a1 · ln n + a2. r2: the share of the weighted variance of p_n that the fit explains."""

    a1: float
    a2: float
    r2: float


def fit_logarithm(p: np.ndarray, weights: np.ndarray) -> Fit:
    """Fit p_n by weighted least squares over n = 1 … len(p).

    p, weights: [n] float64. A weight of 0 leaves an n out. Raises ValueError for different shapes, negative weights, or
    weights that are all 0.
    """
    if p.shape != weights.shape or not weights.sum() > 0 or (weights < 0).any():
        raise ValueError(
            f"p and weights must have the same shape, and weights must be ≥ 0 and not all 0, got {p.shape} and {weights.shape}"
        )
    log_n = np.log(np.arange(1, len(p) + 1))
    mean_x, mean_p = (np.average(x, weights=weights) for x in (log_n, p))
    dx, dp = log_n - mean_x, p - mean_p
    a1 = float((weights * dx * dp).sum() / (weights * dx * dx).sum())
    rest = weights @ (dp - a1 * dx) ** 2
    return Fit(a1, float(mean_p - a1 * mean_x), 1 - float(rest / (weights @ dp**2)))


def occurrences(lengths: np.ndarray, size: int, window: int | None = None) -> np.ndarray:
    """Return how many tokens with a target see n keys, for n = 1 … size, in documents of the given lengths.

    window: the most keys that a query sees. The last token of a document has no target. The count of n = 1 is 0, because
    the softmax over one key is 1 for any p_1.
    """
    ended = np.cumsum(np.bincount(np.minimum(lengths, size + 1), minlength=size + 2))
    counts = len(lengths) - ended[1 : size + 1]  # documents of more than n tokens
    if window is not None and window < size:
        counts[window - 1] += counts[window:].sum()
        counts[window:] = 0
    counts[0] = 0
    return counts


def training_lengths(run: Run, data_path: str | None) -> np.ndarray:
    """Return the lengths of the documents in training. If each row is one document, this is one row's length."""
    data = run.config.data
    if data.one_document:
        return np.array([data.length])
    from ssscale.data.stream import PackedData

    rows = PackedData.open(data_path or data.path, length=data.length)
    every = [rows.row(source, i).lengths for source, count in rows.sources.items() for i in range(count)]
    return np.concatenate(every)


def learned_pn(run: Run) -> np.ndarray:
    """Return p_n of the newest checkpoint, [n] float64. Raises UserError without a checkpoint or p_n."""
    if run.checkpoint is None:
        raise UserError(f"{run.folder} has no checkpoint")
    from ssscale.parallel.groups import initialize
    from ssscale.train.checkpoint import CheckpointReader
    from ssscale.train.reading import reading

    with reading(run.folder, initialize()) as checkpoint:
        reader = CheckpointReader(checkpoint)
        if PN not in reader.weights:
            raise UserError(f"{checkpoint} has no p_n: the run needs model.mixers=[ssmax] model.mixer.ssmax.variant=pn")
        return reader.whole(PN, "weight").numpy().astype(np.float64)


def draw(p: np.ndarray, fit: Fit, title: str, file: Path) -> None:
    """Draw p_n by n with the fit, like Figure 2."""
    from matplotlib import pyplot as plt

    from eval.checkpoint.drawing import BASELINE, COLOURS, DPI

    figure, axes = plt.subplots(figsize=(7.0, 4.4), layout="constrained")
    n = np.arange(1, len(p) + 1)
    axes.plot(n, p, ".", color=COLOURS[0], markersize=3, label="learned $p_n$")
    label = f"${fit.a1:.3f}\\,\\ln n {'+' if fit.a2 >= 0 else '−'} {abs(fit.a2):.3f}$,  $R^2 = {fit.r2:.3f}$"
    axes.plot(n, fit.a1 * np.log(n) + fit.a2, color=BASELINE, linewidth=1.4, label=label)
    axes.set_xlabel("n, keys that a query sees", fontsize=11)
    axes.set_ylabel("$p_n$", fontsize=11)
    axes.set_title(title, fontsize=12, loc="left")
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=10, framealpha=1, edgecolor="none", loc="lower right")
    figure.savefig(file, dpi=DPI, format="png")
    plt.close(figure)


def main() -> None:
    parser = Parser(
        "python -m eval.papers.pn_fit", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path)
    parser.add_argument("--figure", type=Path)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--data", help="the data folder, if it has moved")
    arguments = parser.parse_args()
    file = arguments.figure or arguments.run / "pn.png"
    if file.suffix != ".png":
        raise UserError(f"--figure {file}: the figure is a PNG image, so its name has to end in .png")
    run = Run.open(arguments.run)
    p = learned_pn(run)
    weights = occurrences(training_lengths(run, arguments.data), len(p), run.config.model.position.window)
    fit = fit_logarithm(p, weights.astype(np.float64))
    print(
        f"p_n ≈ {fit.a1:.4f} ln n {fit.a2:+.4f}, R² {fit.r2:.4f} over {int((weights > 0).sum())} n, {run.tokens:,} tokens"
    )
    if arguments.json is not None:
        write(arguments.json, {"kind": "pn", "run": run.name, "pn": p.round(4).tolist(), **fit._asdict()})
    draw(p[: run.config.model.position.window], fit, f"{run.name}: {run.tokens / 1e6:,.0f}M tokens", file)
    print(file)


if __name__ == "__main__":
    with sentences():
        main()
