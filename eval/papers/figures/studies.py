"""Draws the studies' figures from the JSON files of eval.papers.study: the mean over seeds, and their range as a band."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter

from eval.checkpoint.drawing import BASELINE, COLOURS, MARKERS, STYLES, axes_of
from eval.papers.figures.length import smoothed
from eval.papers.study.whole import Result, Results, at, of_job, read_results
from ssscale.errors import UserError
from ssscale.json_object import read_json

NAMES = {
    "softmax": "(a) softmax",
    "ssmax": "(b) SSMax",
    "ssmax_fixed": "(c) s = 1",
    "ssmax_bias": "(d) with bias",
    "ssmax_after": "(e) switched after",
    "ssmax_during": "(f) switched during",
    "ssmax_pn": "learned $p_n$",
    "sb": "stick-breaking",
    "sb_rem": "stick-breaking, remainder",
    "rope": "RoPE",
    "rope-ntk": "RoPE, NTK",
    "alibi": "ALiBi",
    "fire": "FIRE",
    "nope": "NoPE",
    "window512": "window 512",
    "window1024": "window 1,024",
    "rope-window": "RoPE, window 2,048",
    "rope_8k": "RoPE, trained on 8K",
    "rope_8k-ntk": "RoPE, trained on 8K, NTK",
}
CHANGES = {"": "", "scaling=dynamic_ntk": "-ntk", "window=": "-window"}  # how changed keys are named


def load(folder: Path, key: str, rates: bool = False) -> Results:
    """Return the results of a study that have `key`, by job in the order of NAMES and by seed.

    rates: also METHOD@RATE, the whole trainings that do not stand for their method. Raises UserError if there are none.
    """
    every = read_results(folder)
    found = {job: some for job, all_of in every.items() if (some := [result for result in all_of if key in result])}
    order = list(NAMES)
    jobs = sorted(found, key=lambda job: (order.index(job) if job in order else len(order), job))
    jobs = [job for job in jobs if rates or "@" not in job]
    if not jobs:
        raise UserError(
            f"{folder} has no results with {key}: make them with `python -m eval.papers.study {folder.name}`"
        )
    return {job: found[job] for job in jobs}


def name_of(job: str) -> str:
    """Return the job's name for a legend. `sb+width` is a variation of `sb`."""
    method, _, kind = job.partition("+")
    return NAMES.get(method, method) + (f", {kind}" if kind else "")


def style(index: int) -> dict[str, Any]:
    return {"color": COLOURS[index % len(COLOURS)], "linestyle": STYLES[index // len(COLOURS) % len(STYLES)]}


def band(axes: Axes, x: np.ndarray, curves: np.ndarray, index: int, label: str, **more: Any) -> None:
    """Draw the mean of curves [seeds, x] and fill their range."""
    axes.plot(x, curves.mean(0), **style(index), linewidth=1.8, label=label, **more)
    if len(curves) > 1:
        axes.fill_between(x, curves.min(0), curves.max(0), color=style(index)["color"], alpha=0.2, linewidth=0)


def seeds_of(results: Results) -> str:
    counts = sorted({len(some) for some in results.values()})
    text = str(counts[0]) if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    return f"{text} seed{'' if counts == [1] else 's'}"


def paired(results: Results, job: str, baseline: str) -> Iterator[tuple[Result, Result]]:
    """Yield (result, baseline's result) of each seed that both have."""
    of_baseline = {result["seed"]: result for result in results.get(baseline, [])}
    for result in results[job]:
        if result["seed"] in of_baseline:
            yield result, of_baseline[result["seed"]]


def losses(folder: Path) -> Figure:
    """Draw training losses, and below them the differences to the first job with the same seed."""
    results = load(folder, "training")
    baseline = next(iter(results))
    figure, (above, below) = plt.subplots(
        2, 1, sharex=True, figsize=(7.5, 6.4), height_ratios=(3, 2), layout="constrained"
    )
    low: list[float] = []
    for index, (job, some) in enumerate(results.items()):
        curves = [np.array(result["training"]["loss"], dtype=float) for result in some]
        size = min(map(len, curves))
        tokens = np.array(some[0]["training"]["tokens"][:size])
        band(above, tokens, np.array([smoothed(curve[:size]) for curve in curves]), index, name_of(job))
        apart, last = ([], []) if job == baseline else _above(results, job, baseline)
        if apart and all(len(x) == len(tokens) for x in apart):
            label = f"{name_of(job)}: {np.mean(last):+.4f} [{min(last):+.4f}, {max(last):+.4f}], last 10 %"
            band(below, tokens, np.array([smoothed(x, 4) for x in apart]), index, label)
            low += [float(x[len(x) // 5 :].min()) for x in apart] + [float(x[len(x) // 5 :].max()) for x in apart]
    below.axhline(0, color=BASELINE, linewidth=1.2)
    if low:
        below.set_ylim(min(0, *low) - 0.01, max(0, *low) + 0.01)
    axes_of(figure, above, f"Training loss, mean and range of {seeds_of(results)}", "", "loss (nats per token)")
    axes_of(figure, below, f"Above {name_of(baseline)}", "training tokens", "difference (nats)")
    below.xaxis.set_major_formatter(EngFormatter(sep=""))
    above.legend(fontsize=8, framealpha=1, edgecolor="none")
    handles, labels = below.get_legend_handles_labels()
    if handles:
        figure.legend(handles, labels, fontsize=8, edgecolor="none", loc="outside lower center", ncols=2)
    return figure


def same_rate(folder: Path) -> Figure | None:
    """Draw how far training losses lie above those of the first job at the same learning rate, one panel per rate.

    Returns None if no rate has several jobs.
    """
    results = load(folder, "training", rates=True)
    methods = [job for job in results if "@" not in job]
    panels = {}
    for rate in sorted({result["rate"] for some in results.values() for result in some}):
        there = {method: some for method in methods if (some := of_job(results, at(method, rate)))}
        if methods[0] in there and len(there) > 1:
            panels[rate] = there
    if not panels:
        return None
    size = (0.8 + 5.6 * len(panels), 4.4)
    figure, row = plt.subplots(1, len(panels), figsize=size, layout="constrained", squeeze=False)
    for axes, (rate, there) in zip(row[0], panels.items(), strict=True):
        for index, job in enumerate(methods):
            apart, last = _above(there, job, methods[0]) if job in there and index else ([], [])
            tokens = np.array(there[job][0]["training"]["tokens"]) if apart else np.array([])
            if apart and all(len(x) == len(tokens) for x in apart):
                curves = np.array([smoothed(x, 4) for x in apart])
                band(axes, tokens, curves, index, f"{name_of(job)}: {np.mean(last):+.4f}, last 10 %")
        axes.axhline(0, color=BASELINE, linewidth=1.2)
        axes.set_ylim(-0.15, 0.15)
        axes_of(
            figure, axes, f"Learning rate {rate:g}: above {name_of(methods[0])}", "training tokens", "difference (nats)"
        )
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
        axes.legend(fontsize=8, framealpha=1, edgecolor="none")
    return figure


def _above(results: Results, job: str, baseline: str) -> tuple[list[np.ndarray], list[float]]:
    """Return the differences of training losses to those of `baseline` with the same seed, and of their last tenths."""
    pairs = [(one["training"], other["training"]) for one, other in paired(results, job, baseline)]
    return [_difference(*pair) for pair in pairs], [one["last_tenth"] - other["last_tenth"] for one, other in pairs]


def _difference(one: Result, other: Result) -> np.ndarray:
    """Return the difference of two curves, or an empty array if their tokens differ."""
    if one["tokens"] != other["tokens"]:
        return np.array([])
    return np.array(one["loss"], dtype=float) - np.array(other["loss"], dtype=float)


def by_position(folder: Path) -> Figure:
    """Draw the loss by position (arXiv:2501.19399, Figure 5)."""
    results = load(folder, "by_position")
    figure, axes = plt.subplots(figsize=(7.5, 4.8), layout="constrained")
    for index, (job, some) in enumerate(results.items()):
        curves = np.array([smoothed(np.array(result["by_position"]["mean"])) for result in some])
        x = (np.arange(curves.shape[1]) + 0.5) * some[0]["by_position"]["bin"]
        band(axes, x, curves, index, name_of(job))
    first = next(iter(results.values()))[0]["by_position"]
    axes.axvline(first["train_length"], color="0.4", linestyle=":", linewidth=1.2, label="training length")
    title = f"Loss by position, {first['windows']} windows, mean and range of {seeds_of(results)}"
    axes_of(figure, axes, title, "position in the context (tokens)", "loss (nats per token)")
    axes.set_xscale("log")
    axes.legend(fontsize=8, framealpha=1, edgecolor="none")
    return figure


def needles(folder: Path) -> Figure:
    """Draw the share of numbers found by depth and length, one panel per job: mean, and the range below it."""
    results = load(folder, "needle")
    columns = min(3, len(results))
    rows = -(-len(results) // columns)
    figure, panels = plt.subplots(
        rows, columns, figsize=(1.2 + 4.4 * columns, 0.6 + 3.2 * rows), layout="constrained", squeeze=False
    )
    image = None
    for axes, (job, some) in zip(panels.flat, results.items()):
        shares = np.array([shares_of(result) for result in some])
        cells = some[0]["needle"]["cells"]
        lengths, depths = (sorted({cell[key] for cell in cells}) for key in ("length", "depth"))
        image = axes.imshow(shares.mean(0), cmap="cividis", vmin=0, vmax=1, aspect="auto")
        for (y, x), share in np.ndenumerate(shares.mean(0)):
            text = f"{share:.2f}" + (f"\n{shares[:, y, x].min():.2f}–{shares[:, y, x].max():.2f}" * (len(some) > 1))
            axes.text(x, y, text, ha="center", va="center", fontsize=7, color="black" if share > 0.5 else "w")
        axes.set_xticks(range(len(lengths)), [f"{length:,}" for length in lengths], rotation=45, fontsize=8)
        axes.set_yticks(range(len(depths)), [f"{depth} %" for depth in depths], fontsize=8)
        title = f"{name_of(job)}: {cells[0]['samples']} samples, {seeds_of({job: some})}"
        axes.set_title(title, fontsize=10, loc="left")
    for axes in list(panels.flat)[len(results) :]:
        axes.set_visible(False)
    if image is not None:
        figure.colorbar(image, ax=panels, label="share of numbers found")
    return figure


def shares_of(result: Result) -> np.ndarray:
    """Return the shares of numbers found, [depths, lengths] in ascending order."""
    cells = {(cell["depth"], cell["length"]): cell["correct"] / cell["samples"] for cell in result["needle"]["cells"]}
    depths, lengths = (sorted({key[axis] for key in cells}) for axis in (0, 1))
    return np.array([[cells[depth, length] for length in lengths] for depth in depths])


def heads(folder: Path) -> Figure:
    """Draw the needle scores of all heads, and of the top head of every trial, in descending order."""
    results = load(folder, "needle")
    figure, (left, right) = plt.subplots(1, 2, figsize=(11.5, 4.4), layout="constrained")
    for index, (job, some) in enumerate(results.items()):
        scores = np.array([result["needle"]["heads"]["scores"] for result in some])
        band(left, np.arange(1, scores.shape[1] + 1), scores, index, name_of(job))
        tops = np.array([[top for top, _, _ in result["needle"]["trials"]] for result in some])
        found = np.mean([[outcome == "number" for *_, outcome in r["needle"]["trials"]] for r in some])
        band(right, np.arange(1, tops.shape[1] + 1), tops, index, f"{name_of(job)}: {found:.0%} found")
    length = next(iter(results.values()))[0]["needle"]["heads"]["length"]
    axes_of(figure, left, f"All heads on one prompt of {length:,} tokens", "head, by rank", "attention to the number")
    axes_of(figure, right, f"The top head of every trial, {seeds_of(results)}", "trial, by rank", "")
    left.set_xscale("log")
    for axes in (left, right):
        axes.set_ylim(bottom=0)
        axes.legend(fontsize=8, framealpha=1, edgecolor="none")
    return figure


def context_losses(results: Results, key: str) -> dict[str, list[dict[int, float]]]:
    """Return {job and changed keys: [{length: loss}, one per seed]} of `books` or `articles`."""
    found: dict[str, list[dict[int, float]]] = {}
    for job, some in results.items():
        for result in some:
            for changes, entry in result.get(key, {}).items():
                kind = next((short for part, short in CHANGES.items() if part and part in changes), "")
                losses = {int(length): loss for length, loss in entry["losses"].items()}
                found.setdefault(job + kind, []).append(losses)
    return found


def contexts(folder: Path) -> Figure:
    """Draw the loss by context length on test documents and on Wikitext's articles (arXiv:2410.17980, Figure 5)."""
    results = load(folder, "books")
    both = {key: found for key in ("books", "articles") if (found := context_losses(results, key))}
    figure, row = plt.subplots(1, len(both), figsize=(0.8 + 5.6 * len(both), 5.6), layout="constrained", squeeze=False)
    for axes, (key, found) in zip(row[0], both.items(), strict=True):
        for index, (job, some) in enumerate(found.items()):
            lengths = sorted(set.intersection(*map(set, some)))
            curves = np.array([[losses[length] for length in lengths] for losses in some])
            marker = MARKERS[index % len(MARKERS)]
            band(axes, np.array(lengths), curves, index, name_of(job), marker=marker, markersize=4)
        axes.set_xscale("log", base=2)  # before the ticks, which it would replace
        axes.set_xticks(lengths, [f"{n // 1024}K" if n % 1024 == 0 else str(n) for n in lengths])
        axes.minorticks_off()
        axes_of(
            figure, axes, f"{key}, mean and range of {seeds_of(results)}", "context (tokens)", "loss (nats per token)"
        )
    handles, labels = row[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, fontsize=8, edgecolor="none", loc="outside lower center", ncols=4, handlelength=3)
    return figure


def factors(folder: Path) -> Figure:
    """Draw the learned p_n of every seed with its fit (arXiv:2501.19399, Figure 2)."""
    results = load(folder, "pn")
    figure, axes = plt.subplots(figsize=(7.0, 4.4), layout="constrained")
    for index, result in enumerate(result for some in results.values() for result in some):
        found = result["pn"]
        n = np.arange(1, len(found["pn"]) + 1)
        axes.plot(n, found["pn"], ".", color=COLOURS[index % len(COLOURS)], markersize=2)
        label = f"seed {result['seed']}: {found['a1']:.3f} ln n + {found['a2']:.3f}, $R^2$ {found['r2']:.3f}"
        axes.plot(n, found["a1"] * np.log(n) + found["a2"], **style(index), linewidth=1.2, label=label)
    axes_of(figure, axes, "The learned $p_n$", "n, keys that a query sees", "$p_n$")
    axes.legend(fontsize=9, framealpha=1, edgecolor="none", loc="lower right")
    return figure


def has(folder: Path, key: str) -> bool:
    """Return whether a study has results with `key`."""
    return any(key in read_json(file) for file in folder.glob("*-s*.json"))
