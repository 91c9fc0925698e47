"""Measures whether a model uses a passage far back in its context. It needs no fine-tuning, as the needle test does.

    python -m eval.papers.repeats RUN [RUN ...] --texts FILE[.zst] [--lengths 1024,2048,4096,8192] [--depths 10,50,90]
        [--samples 100] [model.position.rope.base=500000 ...]

--texts is read as in eval.papers.long_context. A prompt is a text that contains a passage of 48 tokens from elsewhere,
and that ends with the same passage again. The first 16 tokens of the repetition are the cue. The other 32 are measured:
their mean loss, and the share of them that are the model's most likely token. A length counts all tokens of the prompt.
The passage follows the last sentence that ends at or before the given depth, in percent of the text. The same prompts
are also measured with more text in place of the passage. Their loss is that of a model that cannot look so far back.

Every model gets the same prompts, and all lengths have the same passages. The command writes
RUN/eval/[CHANGES/]repeats-step-XXXXXXXX.json after each cell. If it was stopped, the same command continues. Then draw
the figure with `python -m eval.papers.figures repeats RUN ...`.
"""

import argparse
from pathlib import Path

from eval.checkpoint.command import Parser, sentences, whole_numbers
from eval.checkpoint.environment import prepare
from eval.papers.runs import runs_and_changes
from ssscale.errors import UserError


def main() -> None:
    parser = Parser(
        "python -m eval.papers.repeats", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", nargs="+", help="runs or checkpoints, and model.* keys to change")
    parser.add_argument(
        "--texts", type=Path, required=True, help="a .jsonl file, or a text file as one document; also .zst"
    )
    parser.add_argument("--lengths", default="1024,2048,4096,8192", help="comma-separated prompt lengths in tokens")
    parser.add_argument("--depths", default="10,50,90", help="positions of the passage in percent of the text")
    parser.add_argument("--samples", type=int, default=100, help="prompts per length and depth")
    arguments = parser.parse_intermixed_args()
    prepare()
    with sentences():
        if arguments.samples < 1:
            raise UserError(f"--samples must be at least 1, not {arguments.samples}")
        depths = whole_numbers(arguments.depths, "--depths", 0, 100)
        lengths = whole_numbers(arguments.lengths, "--lengths")
        cells = [(length, depth) for length in lengths for depth in (None, *depths)]
        runs, changes = runs_and_changes(arguments.runs)

        from eval.papers.passages import evaluate

        for run in runs:
            print(evaluate(run, changes, arguments, cells))


if __name__ == "__main__":
    with sentences():
        main()
