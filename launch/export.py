"""A checkpoint as a folder for transformers:   python launch/export.py checkpoint=RUN out=FOLDER [dtype=bfloat16]

checkpoint: a run folder (its newest checkpoint) or a checkpoint folder, of any parallel layout
out:        a folder that does not exist yet or is empty
dtype:      float32 (as trained, every bit), bfloat16 or float16

AutoModelForCausalLM.from_pretrained(FOLDER, trust_remote_code=True) loads it with transformers alone. Needs no GPU.
`python launch/import_hf.py` is the way back.
"""

import logging
import sys
from pathlib import Path

if not __package__:  # run as a file: imports start at the repository's root, not in launch/
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from eval.environment import prepare
from launch.cli import run, take_options
from ssscale.errors import UserError

OPTIONS = {"checkpoint": str, "out": str, "dtype": str}


def main(argv: list[str]) -> None:
    options, rest = take_options(argv, OPTIONS)
    if rest:
        raise UserError(f"unknown argument {rest[0]!r}: this command takes {', '.join(f'{key}=' for key in OPTIONS)}")
    for key, hint in (
        ("checkpoint", "RUN is missing: name a run folder or a checkpoint folder"),
        ("out", "FOLDER is missing"),
    ):
        if not options.get(key):
            raise UserError(f"{key}={hint}")
    prepare()
    logging.basicConfig(level=logging.WARNING, format="%(message)s")

    from eval.text import TextTokenizer
    from ssscale.hf.convert import export_checkpoint
    from ssscale.parallel.groups import initialize
    from ssscale.train.reading import reading

    out = Path(options["out"])
    with reading(Path(options["checkpoint"]), initialize()) as checkpoint:
        tokenizer = TextTokenizer.of_checkpoint(checkpoint)
        export_checkpoint(checkpoint, out, tokenizer.bos_id, tokenizer.eos_id, options.get("dtype", "float32"))
    print(f"{checkpoint} → {out}")


if __name__ == "__main__":
    run(main, __doc__)
