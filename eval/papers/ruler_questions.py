"""Makes questions for fine-tuning a model for RULER's kinds of tasks, with seeds and keys of their own.

    python -m eval.papers.ruler_questions --texts FILE.jsonl[.zst],... --squad FILE[,FILE...] --tokenizer tokenizer.json
        --out questions.json [--samples 8192] [--length 2048] [--seed 1]

The file is in SQuAD's form for `launch/finetune.py questions=FILE data.length=2048`. Its prompts and answers have the words
of RULER's tasks (arXiv:2404.06654), so that a model need not guess what an answer looks like. A sample takes between 0.6
and 1 of --length tokens, BOS and answer included.

    needle     one number in a text, asked for as eval.papers.needle does, with other names than its cities
    niah       1 or 4 keys, values and questions; words, numbers or UUIDs; in a text, in repeated noise, among other needles
    vt         variables that get one value along a chain of assignments
    cwe, fwe   the most frequent words of a list
    qa         a question of --squad, whose document is one of several

No sample is one of RULER's. Words of RULER's needles are ADJECTIVE-NOUN; here they are NOUN-ADJECTIVE, and never one of
those. Texts come from --texts and --squad, which must not be those of the evaluation. Sample i depends on the seed and i
alone.
"""

import argparse
import os
from pathlib import Path

from eval.checkpoint.command import Parser, sentences, write
from ssscale.errors import UserError


def main() -> None:
    parser = Parser(
        "python -m eval.papers.ruler_questions",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--texts", required=True, help="comma-separated files of training documents")
    parser.add_argument("--squad", required=True, help="comma-separated files in SQuAD's form")
    parser.add_argument("--tokenizer", type=Path, required=True, help="that of the model")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--samples", type=int, default=8192)
    parser.add_argument("--length", type=int, default=2048, help="tokens of the longest sample")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--workers", type=int, default=min(16, os.cpu_count() or 1), help="processes")
    options = parser.parse_args()
    with sentences():
        if options.samples < 1:
            raise UserError(f"--samples must be at least 1, not {options.samples}")
        from eval.papers.ruler_samples import make, read_sources

        texts, squad = ([Path(name) for name in text.split(",")] for text in (options.texts, options.squad))
        sources = read_sources(texts, squad, options.tokenizer, options.length)
        names = {"texts": [file.name for file in texts], "squad": [file.name for file in squad]}
        about = {"seed": options.seed, "length": options.length, **names}
        write(options.out, make(sources, options.samples, options.seed, about, options.workers))
        print(f"{options.samples:,} questions: {options.out}")


if __name__ == "__main__":
    with sentences():
        main()
