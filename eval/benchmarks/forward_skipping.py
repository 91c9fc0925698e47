"""Measures what skipping saves in evaluation: lm-eval on long texts, one at a time, with and without.

    python -m eval.benchmarks.forward_skipping RUN --texts FILE.jsonl[.zst] [--lengths 4096,8192,16384,32768]
        [--tokens 524288] [--repeats 3]

RUN is a trained stick-breaking model: how much is skipped depends on its training. The forward pass stops at a tile whose
queries have less than `skip_below` of their stick left. The paper reports evaluation that is 9.3 % faster at 16K, with a
batch size of 1 (arXiv:2410.17980, Section 4). Each length reads the same --tokens of the documents, in texts of that length.
A time is that of lm-eval's whole evaluation, the median of --repeats, of which each has one call with and one without; a
call before compiles the kernels. The command prints a table and writes RUN/eval/skipping-step-XXXXXXXX.json.
"""

import argparse
from pathlib import Path

from eval.checkpoint.command import Parser, sentences, whole_numbers
from eval.checkpoint.environment import prepare
from ssscale.errors import UserError

PAPER = {16_384: 9.3}  # percent


def main() -> None:
    parser = Parser(
        "python -m eval.benchmarks.forward_skipping",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("run", type=Path)
    parser.add_argument("--texts", type=Path, required=True, help="held-out documents, or one text; also .zst")
    parser.add_argument("--lengths", default="4096,8192,16384,32768")
    parser.add_argument("--tokens", type=int, default=524_288, help="tokens that each length reads")
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    prepare()
    with sentences():
        from eval.benchmarks.skipping_times import SPARE, measure  # torch and lm-eval, which --help does not need
        from ssscale.parallel.groups import initialize

        lengths = sorted(set(whole_numbers(options.lengths, "--lengths", 2 * SPARE)))
        if options.repeats < 1 or options.tokens < 1:
            raise UserError("--repeats and --tokens must be at least 1")
        found = measure(options.run, options.texts, lengths, options.tokens, options.repeats, initialize())
        print(
            "| length | texts | seconds | without skipping | faster, percent | the paper's | bits per byte | without |"
        )
        print("|---|---|---|---|---|---|---|---|")
        for length, entry in found["lengths"].items():
            took, bits = entry["seconds"], entry["bits_per_byte"]
            faster = 100 * (took["without"] / took["with"] - 1)
            cells = f"{took['with']:.2f} | {took['without']:.2f} | {faster:.1f} | {PAPER.get(int(length), '–')}"
            print(f"| {length} | {entry['texts']} | {cells} | {bits['with']:.5f} | {bits['without']:.5f} |")


if __name__ == "__main__":
    with sentences():
        main()
