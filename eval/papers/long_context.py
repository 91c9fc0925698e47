"""Computes the loss on contexts longer than in training, by position and by length.

    python -m eval.papers.long_context RUN [RUN ...] --texts FILE[.zst] [--lengths 20000] [--windows 100]
        [--join | --articles] [model.position.rope.base=500000 ...]

--texts names a .jsonl file with one document per line (key `text` or `page`). Any other file is read as plain text and is
one document. Both may be compressed as .zst.

Documents are cut into windows of the longest length, without overlap. The rest of a document is dropped. --join reads
all documents as one, each with its boundary tokens. Shorter lengths divide the same windows into more pieces. So all
lengths have the same targets, except the first token of each piece, which no length counts. Every model reads the
same windows.

--articles reads every document by itself and whole, however short, as lm-eval's Wikitext does: each piece of a length
predicts the tokens after its own, so that all tokens of all lengths are targets. Documents with the key `page` pass
lm-eval's detokenizer of Wikitext.

Figure 5 of arXiv:2501.19399 is the loss by position at --lengths 20000 with 50 times RoPE's base. Figure 5 of
arXiv:2410.17980 is the loss at --lengths 2048,4096,...,65536. model.* keys are changed for this evaluation only.

All GPUs of the machine share the windows (--processes 1: one GPU). The command prints a table and writes
RUN/eval/[CHANGES/]long_context-step-XXXXXXXX.json, with --articles articles-step-XXXXXXXX.json, after each length. If it
was stopped, the same command continues. Then draw the figures with `python -m eval.papers.figures loss_by_position RUN
...` and `extrapolation RUN ...`.
"""

import argparse
import sys
from pathlib import Path

from eval.checkpoint.command import Parser, begun, sentences, whole_numbers
from eval.checkpoint.environment import prepare
from eval.papers.parts import Share, processes_of, share_out
from eval.papers.runs import runs_and_changes
from ssscale.errors import UserError


def parse_lengths(text: str) -> list[int]:
    """Parse --lengths into ascending order. Raises UserError if the lengths do not divide each other as needed."""
    lengths = sorted(set(whole_numbers(text, "--lengths")))
    if lengths[0] < 2 or any(lengths[-1] % length for length in lengths) or any(n % lengths[0] for n in lengths):
        raise UserError(
            f"--lengths={text}: each must be at least 2, divide the longest and be a multiple of the shortest"
        )
    return lengths


def main() -> None:
    parser = Parser(
        "python -m eval.papers.long_context", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", nargs="+", help="runs or checkpoints, and model.* keys to change")
    parser.add_argument(
        "--texts", type=Path, required=True, help="a .jsonl file, or a text file as one document; also .zst"
    )
    parser.add_argument("--lengths", default="20000", help="comma-separated context lengths in tokens")
    parser.add_argument("--windows", type=int, default=100, help="maximum number of windows of the longest length")
    parser.add_argument("--join", action="store_true", help="read all documents as one")
    parser.add_argument("--articles", action="store_true", help="read every document by itself and whole")
    parser.add_argument("--processes", type=int, help="processes that share the windows (default: one per GPU)")
    parser.add_argument("--share", help=argparse.SUPPRESS)  # what share_out starts
    arguments = parser.parse_intermixed_args()
    prepare()
    with sentences():
        if arguments.windows < 1:
            raise UserError(f"--windows must be at least 1, not {arguments.windows}")
        if arguments.join and arguments.articles:
            raise UserError("--join and --articles exclude each other")
        lengths = parse_lengths(arguments.lengths)
        runs, changes = runs_and_changes(arguments.runs)
        share = Share.parse(arguments.share) if arguments.share else None

        from eval.papers.context_losses import PART, Evaluation

        if share is None and (count := processes_of(arguments.processes, -(-arguments.windows // PART))) > 1:
            share_out("eval.papers.long_context", sys.argv[1:], count)
        for run in runs:
            evaluation = Evaluation(run, changes, arguments, lengths)
            if share is None:
                print(evaluation.run())
            else:
                done = begun(evaluation.file, evaluation.settings).get("lengths", {})
                for length in lengths:
                    if str(length) not in done:
                        evaluation.compute(length, share)


if __name__ == "__main__":
    with sentences():
        main()
