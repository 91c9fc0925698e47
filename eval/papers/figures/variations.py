"""Draws MQRAR by training step, and stick-breaking against other methods with one thing varied at a time."""

from collections.abc import Callable, Iterable
from pathlib import Path

from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from eval.checkpoint.drawing import BASELINE, COLOURS, MARKERS, STYLES, axes_of
from eval.papers.figures import recall
from eval.papers.figures.studies import NAMES, context_losses, load, seeds_of
from eval.papers.study.studies import SHORT_FIRST, VARIED
from eval.papers.study.whole import Result, Results, read_results

KINDS = ("", *VARIED)
CHANGED = {
    "": "nothing",
    "tokens": "4 times\nthe tokens",
    "width": "32 heads\nof 32",
    "heads": "8 heads\nof 64",
    "books": "only books",
}
Contexts = dict[str, list[dict[int, float]]]  # job → {length: loss}, one per seed
HIGHEST = 0.3  # nats; what is farther from stick-breaking is not drawn


def by_step(folder: Path) -> Figure:
    """Draw the accuracy by training step of each MQRAR job, every seed, without and with short sequences first."""
    results = load(folder, "mqrar")
    figure, row = plt.subplots(1, 2, figsize=(11.5, 4.8), sharey=True, layout="constrained")
    pairs = sorted({some[0]["mqrar"]["pairs"] for some in results.values()})
    for axes, title, short in zip(row, ("As published", "On short sequences first"), (False, True), strict=True):
        there = {job: some for job, some in results.items() if job.startswith(SHORT_FIRST) == short}
        for some in sorted(there.values(), key=lambda some: (some[0]["mqrar"]["core"], some[0]["mqrar"]["pairs"])):
            _accuracies(axes, [result["mqrar"] for result in some], pairs)
        title += f", {seeds_of(there)}" if there else ""
        axes_of(figure, axes, title, "training step", "" if short else "share of questions answered")
        axes.set_ylim(-0.03, 1.03)
    handles = {label: handle for axes in row for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    figure.legend(
        handles.values(),
        handles.keys(),
        fontsize=8.5,
        edgecolor="none",
        loc="outside lower center",
        ncols=2,
        handlelength=3,
    )
    return figure


def _accuracies(axes: Axes, some: list[Result], pairs: list[int]) -> None:
    """Draw the best learning rate's accuracy of every seed: a colour for each number of pairs, a line style for each core."""
    colour = COLOURS[pairs.index(some[0]["pairs"]) % len(COLOURS)]
    stickbreaking = some[0]["core"] == "stickbreaking"
    for number, result in enumerate(some):
        steps, accuracies, _ = zip(*result["history"], strict=True)
        label = f"{recall.NAMES[result['core']]}, {result['pairs']} pairs"
        axes.plot(
            steps,
            [max(of_rates) for of_rates in accuracies],
            color=colour,
            linestyle=STYLES[0 if stickbreaking else 1],
            marker=MARKERS[0 if stickbreaking else 1],
            markersize=3.5,
            linewidth=1.5,
            label="_" * bool(number) + label,
        )


def together(folder: Path) -> Results:
    """Return the results of `why`, and those of the same methods with nothing varied, from `positions` beside it.

    Raises UserError if there are none of `why`.
    """
    found = load(folder, "books")
    methods = {job.partition("+")[0] for job in found}
    return {job: some for job, some in read_results(folder.parent / "positions").items() if job in methods} | found


def apart(folder: Path) -> Figure | None:
    """Draw how far the losses of other methods lie above stick-breaking's, by what is varied. None without other methods."""
    results = together(folder)
    varied = {job.partition("+")[0] for job in results if "+" in job}
    methods = [method for method in NAMES if method in varied and method != "sb"]
    if not methods:
        return None
    both = {key: found for key in ("books", "articles") if (found := context_losses(results, key))}
    size = (0.8 + 5.6 * len(both), 7.2)
    figure, rows = plt.subplots(2, len(both), figsize=size, sharex=True, layout="constrained", squeeze=False)
    for column, (key, found) in enumerate(both.items()):
        for axes, (text, choose) in zip(rows[:, column], (("longest", max), ("shortest", min)), strict=True):
            for index, method in enumerate(methods):
                _differences(axes, index, method, differences(found, method, choose))
            axes.axhline(0, color=BASELINE, linewidth=1.2)
            axes.set_xlim(-0.5, len(KINDS) - 0.5)
            axes.set_ylim(-HIGHEST, HIGHEST)
            axes.set_xticks(range(len(KINDS)), [CHANGED[kind] for kind in KINDS])
            title = f"{key}, {text} context: above stick-breaking"
            axes_of(figure, axes, title, "", "difference (nats per token)")
            axes.legend(fontsize=8, framealpha=1, edgecolor="none", loc="lower right")
    return figure


def differences(found: Contexts, method: str, choose: Callable[[Iterable[int]], int]) -> dict[str, float]:
    """Return {what is varied: how far the first seed's loss of a method lies above stick-breaking's}.

    choose: which length, max or min.
    """
    above = {}
    for kind in KINDS:
        one, other = (found.get(f"{job}+{kind}" if kind else job) for job in ("sb", method))
        if one and other:
            length = choose(one[0])
            above[kind] = other[0][length] - one[0][length]
    return above


def _differences(axes: Axes, index: int, method: str, above: dict[str, float]) -> None:
    """Draw those up to HIGHEST, and say in the legend how many are farther."""
    near = {kind: value for kind, value in above.items() if abs(value) <= HIGHEST}
    label = NAMES[method] + (f" ({len(above) - len(near)} farther)" if len(near) < len(above) else "")
    places = [KINDS.index(kind) + 0.15 * (index - 1) for kind in near]
    axes.plot(places, list(near.values()), MARKERS[index], color=COLOURS[index], markersize=8, label=label)
