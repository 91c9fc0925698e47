"""Multi-query repeated associative recall: Figures 3 and 4 of arXiv:2410.17980.

    python -m eval.papers.mqrar curve [--out runs/mqrar] [--pairs 32,64,96,128,160,192] [--steps 6000] [--plain]
        [--minutes 9] [--lrs 4]
    python -m eval.papers.mqrar picture [--out runs/mqrar]

curve measures the accuracy of two-layer models by the number of pairs. For every core, it takes the best of the
paper's four learning rates. The models of these learning rates train as one batch, first on shorter sequences unless
--plain is given. picture writes the attention of narrower models on 16 pairs of a letter and a digit.

Results are JSON files in --out. After --minutes, or on SIGTERM, a command saves and stops, and the same command
continues. --lrs 3 trains only at the third of the paper's learning rates. Then draw the figures with
`python -m eval.papers.figures mqrar` and `mqrar_attention`.
"""

import argparse
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path

from eval.checkpoint.command import Parser, sentences, whole_numbers
from eval.papers.mqrar.recipe import LEARNING_RATES, Deadline, Recipe
from ssscale.errors import SAVED, UserError


def main() -> None:
    parser = Parser(
        "python -m eval.papers.mqrar", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("curve", "picture"))
    parser.add_argument("--out", type=Path, default=Path("runs/mqrar"))
    parser.add_argument("--cores", default="softmax,stickbreaking")
    parser.add_argument("--pairs", default="32,64,96,128,160,192")
    parser.add_argument("--steps", type=int, default=Recipe.steps)
    parser.add_argument("--batch", type=int, default=Recipe.batch)
    parser.add_argument("--minutes", type=float, default=9.0, help="stop after this time and save the state")
    parser.add_argument("--plain", action="store_true", help="train on full-length sequences from the start")
    parser.add_argument("--lrs", default="1,2,3,4", help="which of the paper's learning rates, from 1 to 4")
    parser.add_argument("--test-every", type=int, default=Recipe.test_every, help="steps between tests")
    parser.add_argument("--seed", type=int, default=0, help="of the weights and sequences")
    for name, size in (("length", 768), ("keys", 4096), ("values", 4096), ("width", 256)):
        parser.add_argument(f"--{name}", type=int, default=size)
    arguments = parser.parse_args()
    until = Deadline(time.monotonic() + 60 * arguments.minutes)
    signal.signal(signal.SIGTERM, lambda number, frame: until.stop())
    with sentences():
        if min(arguments.steps, arguments.batch, arguments.test_every) < 1:
            raise UserError("--steps, --batch and --test-every must be at least 1")
        if arguments.width < 2 or arguments.width % 2:
            raise UserError(
                f"--width must be even and at least 2, as RoPE turns pairs of its dims, not {arguments.width}"
            )
        if not arguments.minutes >= 0:
            raise UserError(f"--minutes must be at least 0, not {arguments.minutes:g}")
        rates = whole_numbers(arguments.lrs, "--lrs", 1, len(LEARNING_RATES))
        recipe = replace(
            Recipe(),
            steps=arguments.steps,
            batch=arguments.batch,
            seed=arguments.seed,
            lrs=tuple(LEARNING_RATES[number - 1] for number in rates),
            test_every=arguments.test_every,
        )
        recipe = replace(recipe, short_first=()) if arguments.plain else recipe

        import torch

        from eval.papers.mqrar.experiments import curve, picture
        from ssscale.parallel.groups import initialize

        torch.set_float32_matmul_precision("high")  # the operands are bfloat16: exact in TF32
        done = {"curve": curve, "picture": picture}[arguments.what](arguments, recipe, initialize(), until)
    if not done:
        print("stopped: time is up; the same command continues", file=sys.stderr)
        sys.exit(SAVED)


if __name__ == "__main__":
    with sentences():
        main()
