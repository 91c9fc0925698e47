"""Import a model folder of transformers as a run folder with one checkpoint.

This is the inverse of launch/export.py. The run folder gets config.yaml and a checkpoint of weights without an
optimizer, for launch/evaluate.py checkpoint=RUN and launch/pretrain.py init_from=RUN.
"""

from pathlib import Path

from launch.boot import Command, Option, run
from ssscale.errors import UserError
from ssscale.hf.folder import check_folder
from ssscale.train.checkpoint_folder import check_empty

COMMAND = Command(
    about=__doc__,
    usage="python launch/import_hf.py from=FOLDER out=RUN",
    example="python launch/import_hf.py from=exported/3b_sb out=runs/3b_again",
    options=(
        Option(
            "from",
            str,
            "what launch/export.py wrote, or transformers' save_pretrained of such a model or of a Llama, Mistral, Granite, "
            "Qwen2 or Qwen3, with its tokenizer.json",
            metavar="FOLDER",
            required=True,
        ),
        Option("out", str, "the run folder to be made", metavar="RUN", required=True),
    ),
)


def main(argv: list[str]) -> None:
    options, _ = COMMAND.parse(argv)
    folder, out = Path(options["from"]), Path(options["out"])
    if not (folder / "config.json").is_file():
        raise UserError(f"from={folder}: there is no config.json, so it is not a model of transformers")
    check_folder(folder)
    check_empty(out)
    from eval.checkpoint.environment import prepare

    prepare()

    from ssscale.hf.convert import import_checkpoint
    from ssscale.parallel.groups import initialize

    checkpoint = import_checkpoint(folder, out, initialize())
    print(f"{folder} → {checkpoint}")


if __name__ == "__main__":
    run(COMMAND, main)
