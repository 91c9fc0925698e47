"""Export a checkpoint as a folder for transformers.

AutoModelForCausalLM.from_pretrained(FOLDER, trust_remote_code=True) loads it with transformers alone. The formats llama,
mistral, granite, qwen2 and qwen3 need no remote code and work wherever these models do. Needs no GPU.
`python launch/import_hf.py` converts back.
"""

import logging
from pathlib import Path
from typing import TYPE_CHECKING

from launch.boot import Command, Option, log, run
from ssscale.hf.families import check_exportable
from ssscale.train.checkpoint_folder import check_empty, find_checkpoint, saved_config

if TYPE_CHECKING:
    from ssscale.hf.convert import Exported

FORMATS = ("ssscale", "llama", "mistral", "granite", "qwen2", "qwen3")
DTYPES = ("float32", "bfloat16", "float16")
COMMAND = Command(
    about=__doc__,
    usage="python launch/export.py checkpoint=RUN out=FOLDER [format=llama] [dtype=bfloat16]",
    example="python launch/export.py checkpoint=runs/3b_sb out=exported/3b_sb dtype=bfloat16",
    options=(
        Option(
            "checkpoint",
            str,
            "a run folder (its newest checkpoint) or a checkpoint folder, of any parallel layout",
            metavar="RUN",
            required=True,
        ),
        Option("out", str, "a folder that does not exist yet or is empty", metavar="FOLDER", required=True),
        Option(
            "format",
            str,
            "ssscale: every model, with its code; llama, mistral (with a window), granite (with width transfer), qwen2 (with "
            "qkv_bias), qwen3 (with qk_norm): models of their kind, which transformers has, without trust_remote_code",
            default="ssscale",
            choices=FORMATS,
        ),
        Option(
            "dtype",
            str,
            "dtype of the weights; float32 keeps every bit of the training",
            default="float32",
            choices=DTYPES,
        ),
    ),
)


def main(argv: list[str]) -> None:
    options, _ = COMMAND.parse(argv)
    given, out = Path(options["checkpoint"]), Path(options["out"])
    config = saved_config(find_checkpoint(given, quiet=True))
    if options["format"] != "ssscale":
        check_exportable(config.model, options["format"])
    check_empty(out)
    from eval.checkpoint.environment import prepare

    prepare()
    log(logging.WARNING, force=False)

    from eval.checkpoint.text import TextTokenizer
    from ssscale.hf.convert import export_checkpoint
    from ssscale.parallel.groups import initialize
    from ssscale.train.reading import reading

    with reading(given, initialize()) as checkpoint:
        tokenizer = TextTokenizer.of_checkpoint(checkpoint)
        written = export_checkpoint(
            checkpoint, out, tokenizer.bos_id, tokenizer.eos_id, options["dtype"], options["format"]
        )
    print(f"{checkpoint} → {out}")
    print(describe(written, out, options["dtype"], options["format"]))


def describe(written: "Exported", out: Path, dtype: str, form: str) -> str:
    """Returns the dtype and size of an export and the lines that load it."""
    size = f"{written.bytes / 1e9:.2f} GB" if written.bytes >= 1e8 else f"{written.bytes / 1e6:.2f} MB"
    trust = ", trust_remote_code=True" if form == "ssscale" else ""
    lines = [
        f"{size} of weights in {dtype}; pad token: {'its own' if written.own_pad else 'EOS'}. To load it:",
        "    from transformers import AutoModelForCausalLM, AutoTokenizer",
        f'    model = AutoModelForCausalLM.from_pretrained("{out}", dtype="auto"{trust})',
        f'    tokenizer = AutoTokenizer.from_pretrained("{out}")',
    ]
    if not written.own_pad:
        lines += [
            "The vocabulary has no room for a pad token. Before fine-tuning with a collator that masks padding, add one:",
            '    tokenizer.add_special_tokens({"pad_token": "<|pad|>"})',
            "    model.resize_token_embeddings(len(tokenizer))",
        ]
    return "\n".join(lines)


if __name__ == "__main__":
    run(COMMAND, main)
