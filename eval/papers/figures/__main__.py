"""Draws the papers' figures from result files.

    python -m eval.papers.figures NAME [RUN or FILE ...] [--out runs/figures/NAME]

NAME is one of these:

    fading, threshold                Figures 1 and 3 of arXiv:2501.19399, which need no model
    training_losses RUN RUN ...      its Figure 4                 (from the runs), with differences to the first run
    loss_by_position RUN ...         its Figure 5                 (results of python -m eval.papers.long_context)
    needle_map RUN ...               its Figure 6                 (python -m eval.papers.needle)
    needle_heads, needle_top RUN ... its Figures 7 and 8          (python -m eval.papers.needle --scores)
    mqrar [FOLDER]                   Figure 3 of arXiv:2410.17980 (python -m eval.papers.mqrar curve)
    mqrar_attention [FOLDER]         its Figure 4                 (python -m eval.papers.mqrar picture)
    articles RUN ...                 its Figure 5                 (python -m eval.papers.long_context --articles)
    extrapolation RUN ...            the same with equal targets at every length (python -m eval.papers.long_context)
    ruler RUN ...                    its Figure 6                 (python launch/evaluate.py suite=ruler)
    repeats RUN ...                  what a repeated passage saves (python -m eval.papers.repeats)

Each figure is written as PNG and PDF. `python -m eval.papers.pn_fit RUN` draws Figure 2 of arXiv:2501.19399.
"""

import argparse
import difflib
from collections.abc import Callable
from pathlib import Path

from matplotlib.figure import Figure

from eval.checkpoint.command import Parser, sentences
from eval.checkpoint.drawing import save
from eval.checkpoint.environment import prepare
from eval.papers.figures import length, needle, recall, repeats, ruler, theory, training
from ssscale.errors import UserError

ALONE: dict[str, Callable[[], Figure]] = {"fading": theory.fading, "threshold": theory.threshold}
OF_RUNS: dict[str, Callable[[list[Path]], Figure]] = {
    "training_losses": training.losses,
    "loss_by_position": length.by_position,
    "extrapolation": length.by_context,
    "articles": length.of_articles,
    "repeats": repeats.gain,
    "ruler": ruler.scores,
    "needle_map": needle.heat_map,
    "needle_heads": needle.heads,
    "needle_top": needle.top_heads,
}
OF_FOLDER: dict[str, Callable[[Path], Figure]] = {"mqrar": recall.curve, "mqrar_attention": recall.attention}


def draw(name: str, paths: list[Path]) -> Figure:
    """Draw the figure `name`. Raises UserError for an unknown name and for missing results."""
    if name in OF_RUNS:
        return OF_RUNS[name](paths)
    if name not in ALONE and name not in OF_FOLDER:
        names = [*ALONE, *OF_RUNS, *OF_FOLDER]
        near = difflib.get_close_matches(name, names, n=1) or names
        raise UserError(f"there is no figure {name!r}; did you mean {', '.join(near)}?")
    if len(paths) > (name in OF_FOLDER):
        raise UserError(f"{name} takes no {'further ' if paths[1:] else ''}path, got {paths[-1]}")
    if name in ALONE:
        return ALONE[name]()
    return OF_FOLDER[name](paths[0] if paths else Path("runs/mqrar"))


def main() -> None:
    parser = Parser(
        "python -m eval.papers.figures", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("name")
    parser.add_argument("paths", type=Path, nargs="*")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    prepare()
    with sentences():
        files = save(draw(arguments.name, arguments.paths), arguments.out or Path("runs/figures") / arguments.name)
    print(*files, sep="\n")


if __name__ == "__main__":
    with sentences():
        main()
