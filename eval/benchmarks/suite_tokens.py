"""Counts what an evaluation computes, without a trained model or a GPU: requests, tokens and passes of each task.

    python -m eval.benchmarks.suite_tokens --tokenizer tokenizer.json [--tasks NAME,...] [--eval-data data/eval]
        [--length 2048] [--tokens 131072] [--rows 34000] [--cached 1000000]

Requests are made, grouped and packed as by launch/evaluate.py, and every pass is counted instead of computed. --tokens,
--rows and --cached bound the tokens of a pass, its rows of logits, and the cache during generation; the defaults are those
of a 162M model on an H200. A shared context counts once.
"""

import argparse
from pathlib import Path

from eval.checkpoint.command import Parser, sentences
from eval.checkpoint.environment import prepare


def main() -> None:
    parser = Parser(
        "python -m eval.benchmarks.suite_tokens",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--tasks", help="comma-separated; by default all whose data is there")
    parser.add_argument("--eval-data", default="data/eval")
    parser.add_argument("--length", type=int, default=2048, help="tokens of the longest text")
    parser.add_argument("--tokens", type=int, default=131_072)
    parser.add_argument("--rows", type=int, default=34_000)
    parser.add_argument("--cached", type=int, default=1_000_000)
    options = parser.parse_args()
    prepare()
    with sentences():
        from eval.benchmarks.suite_counts import show_counts  # torch and lm-eval, which --help does not need

        tasks = options.tasks.split(",") if options.tasks else []
        sizes = (options.length, options.tokens, options.rows, options.cached)
        show_counts(options.tokenizer, tasks, options.eval_data, sizes)


if __name__ == "__main__":
    with sentences():
        main()
