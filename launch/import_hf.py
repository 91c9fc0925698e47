"""The way back of launch/export.py:   python launch/import_hf.py folder=FOLDER out=RUN

folder: what launch/export.py wrote, or transformers' save_pretrained of such a model with its tokenizer
out:    a run folder to be: it gets config.yaml and one checkpoint of weights without an optimizer, for
        launch/evaluate.py checkpoint=RUN and launch/pretrain.py init_from=RUN
"""

import sys
from pathlib import Path

if not __package__:  # run as a file: imports start at the repository's root, not in launch/
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from eval.environment import prepare
from launch.cli import run, take_options
from ssscale.errors import UserError

OPTIONS = {"folder": str, "out": str}


def main(argv: list[str]) -> None:
    options, rest = take_options(argv, OPTIONS)
    if rest:
        raise UserError(f"unknown argument {rest[0]!r}: this command takes {', '.join(f'{key}=' for key in OPTIONS)}")
    for key in OPTIONS:
        if not options.get(key):
            raise UserError(f"{key}= is missing: python launch/import_hf.py folder=FOLDER out=RUN")
    prepare()

    from ssscale.hf.convert import import_checkpoint
    from ssscale.parallel.groups import initialize

    checkpoint = import_checkpoint(Path(options["folder"]), Path(options["out"]), initialize())
    print(f"{options['folder']} → {checkpoint}")


if __name__ == "__main__":
    run(main, __doc__)
