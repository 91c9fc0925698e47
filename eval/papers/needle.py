"""Tests whether a model finds a sentence in a long text (arXiv:2501.19399, Sections 3.3 and 3.4).

    python -m eval.papers.needle RUN [RUN ...] --texts FILE.jsonl[.zst] [--lengths 1000,2000,4000,6000,8000,10000]
        [--depths 10,30,50,70,90] [--samples 100] [model.position.rope.base=500000 ...]
    python -m eval.papers.needle RUN [RUN ...] --texts FILE.jsonl[.zst] --scores [--lengths 8000] [--trials 100] [...]

RUN was fine-tuned on question answering by launch/finetune.py, and the prompts have the same format. A prompt is a
text from --texts that contains "The special magic {city} number is: {7 digits}.", followed by a question for the
number. A length counts all tokens of the prompt. The needle follows the last sentence that ends at or before the
given depth, in percent. Decoding is greedy over all tokens except EOS.

--scores measures the attention of each head to the number while the model produces the first token of the answer. It
does so for all heads on one prompt (Figure 7), and for the top head of every trial (Figure 8).

Every model gets the same prompts. All GPUs of the machine share the cells and trials (--processes 1: one GPU). The
command writes RUN/eval/[CHANGES/]needle-step-XXXXXXXX.json, and with --scores needle_scores-step-XXXXXXXX.json. If it was
stopped, the same command continues with the next cell, or the next 16 trials. Then draw the figures with `python -m
eval.papers.figures needle_map RUN ...`, `needle_heads RUN ...` and `needle_top RUN ...`.
"""

import argparse
import sys
from pathlib import Path

from eval.checkpoint.command import Parser, sentences, whole_numbers
from eval.checkpoint.environment import prepare
from eval.papers.parts import Share, processes_of, share_out
from eval.papers.runs import runs_and_changes
from ssscale.errors import UserError


def main() -> None:
    parser = Parser(
        "python -m eval.papers.needle", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", nargs="+", help="runs or checkpoints, and model.* keys to change")
    parser.add_argument(
        "--texts", type=Path, required=True, help="a .jsonl file, or a text file as one document; also .zst"
    )
    parser.add_argument("--lengths", help="comma-separated prompt lengths in tokens")
    parser.add_argument("--depths", default="10,30,50,70,90", help="positions of the needle in percent of the text")
    parser.add_argument("--samples", type=int, default=100, help="prompts per length and depth")
    parser.add_argument("--scores", action="store_true", help="measure attention to the number instead of retrieval")
    parser.add_argument("--trials", type=int, default=100, help="prompts with --scores")
    parser.add_argument("--processes", type=int, help="processes that share the prompts (default: one per GPU)")
    parser.add_argument("--share", help=argparse.SUPPRESS)  # what share_out starts
    arguments = parser.parse_intermixed_args()
    prepare()
    with sentences():
        default = "8000" if arguments.scores else "1000,2000,4000,6000,8000,10000"
        lengths = whole_numbers(arguments.lengths or default, "--lengths")
        depths = whole_numbers(arguments.depths, "--depths", 1, 100)
        if min(arguments.samples, arguments.trials) < 1:
            raise UserError("--samples and --trials must be at least 1")
        if arguments.scores and len(lengths) > 1:
            raise UserError(f"--lengths={arguments.lengths}: --scores takes one length")
        runs, changes = runs_and_changes(arguments.runs)
        kind = "needle_scores" if arguments.scores else "needle"
        share = Share.parse(arguments.share) if arguments.share else None

        from eval.papers.retrieval import TRIALS, Evaluation

        most = 1 + -(-arguments.trials // TRIALS) if arguments.scores else len(lengths) * len(depths)
        if share is None and (count := processes_of(arguments.processes, most)) > 1:
            share_out("eval.papers.needle", sys.argv[1:], count)
        for run in runs:
            evaluation = Evaluation(run, changes, arguments, kind)
            if arguments.scores:
                evaluation.score(lengths[0], arguments.trials, share)
            else:
                evaluation.retrieve(lengths, depths, arguments.samples, share)
            if share is None:
                print(evaluation.file)


if __name__ == "__main__":
    with sentences():
        main()
