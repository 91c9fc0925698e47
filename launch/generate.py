"""Continue a text with the model of a checkpoint.

Prints the prompt and what the model adds to it, token by token. Runs on one GPU, or on the CPU.
"""

import logging
import sys
from collections.abc import Callable
from pathlib import Path

from launch.boot import Command, Option, log, run
from launch.evaluate import CHANGEABLE, CHECKPOINT
from ssscale.errors import UserError
from ssscale.train.checkpoint_folder import find_checkpoint, saved_config

STDIN = "-"
LEAST_TEMPERATURE = 1e-6  # by smaller ones, float32 logits cannot be divided
UNFINISHED = "\ufffd"  # ends the text of tokens that end within a character
COMMAND = Command(
    about=__doc__,
    usage="python launch/generate.py checkpoint=RUN [prompt=TEXT] [samples=N] [key=value ...]",
    example="python launch/generate.py checkpoint=runs/3b_sb prompt='The attention weights of a token' temperature=0",
    options=(
        CHECKPOINT,
        Option("prompt", str, f"the beginning of the text; {STDIN} reads it from stdin (none)"),
        Option("max_new_tokens", int, "tokens to add at most; a text also ends at EOS", default=200, at_least=1),
        Option(
            "temperature",
            float,
            "divides the logits before a token is drawn; 0 takes the most likely token",
            default=0.8,
            at_least=0,
        ),
        Option(
            "top_p",
            float,
            "draws from the most likely tokens that together hold this probability",
            default=0.95,
            above=0,
            at_most=1,
        ),
        Option(
            "samples",
            int,
            "texts to write; they differ if temperature is above 0",
            default=1,
            at_least=1,
            at_most=2**20,
        ),
        Option("seed", int, "of the first text; the others count up from it", default=0, at_least=0, at_most=2**62),
        Option("length", int, "longest prompt and text together, in tokens (the training length)", at_least=2),
    ),
    keys=CHANGEABLE,
)


def main(argv: list[str]) -> None:
    options, changes = COMMAND.parse(argv)
    path = Path(options["checkpoint"])
    if 0 < options["temperature"] < LEAST_TEMPERATURE:
        raise UserError(f"temperature must be 0 or at least {LEAST_TEMPERATURE:g}, not {options['temperature']:g}")
    check(path, changes)
    prompt = read_prompt(options.get("prompt", ""))
    from eval.checkpoint.environment import prepare

    prepare()
    log(logging.WARNING, force=False)

    from eval.checkpoint.text import TextTokenizer
    from ssscale.model.generate import generate
    from ssscale.parallel.groups import initialize
    from ssscale.train.build import load_model
    from ssscale.train.reading import reading

    groups = initialize()
    with reading(path, groups) as checkpoint:
        tokenizer = TextTokenizer.of_checkpoint(checkpoint)
        model, config = load_model(checkpoint, groups, changes=changes)
    tokens = [tokenizer.bos_id, *tokenizer.encode(prompt)]
    length = options.get("length", config.data.length)
    if len(tokens) >= length:
        raise UserError(f"prompt has {len(tokens):,} tokens with BOS, so that length={length} leaves no room for more")
    shown = Shown(lambda text: tokenizer.decode([*tokens[1:], *text]))
    texts = generate(
        model,
        [tokens] * options["samples"],
        options["max_new_tokens"],
        eos_id=tokenizer.eos_id,
        temperature=options["temperature"],
        top_p=options["top_p"],
        seed=options["seed"],
        max_length=length,
        vocab_size=tokenizer.vocab_size,
        stop=shown if options["samples"] == 1 else None,
    )
    for number, text in enumerate(texts, 1):
        if len(texts) > 1:
            print(f"───── {number} of {len(texts)}, seed {options['seed'] + number - 1} ─────")
            shown.count = 0
        shown.add(text, whole=True)


def read_prompt(prompt: str) -> str:
    """Returns the prompt, or stdin for STDIN. Raises UserError for bytes that are not UTF-8."""
    try:
        prompt = sys.stdin.buffer.read().decode() if prompt == STDIN else prompt
        prompt.encode()
    except UnicodeError:
        raise UserError("prompt is not UTF-8 text") from None
    return prompt


def check(path: Path, changes: list[str]) -> None:
    """Raises UserError for mistakes that show without torch."""
    from ssscale.config import change
    from ssscale.validate import validate_checkpoint

    saved = saved_config(find_checkpoint(path, quiet=True))  # `reading` reports damage
    config = change(saved, changes)
    validate_checkpoint(config, saved)
    uncached = [name for name, mixer in config.model.used.items() if not mixer.cached]
    if uncached:
        raise UserError(f"{path}: {uncached[0]} does not define `cached`, so that no text can be generated")


class Shown:
    """Prints a text while it grows. count: the characters that are printed."""

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        self.decode, self.count = decode, 0

    def __call__(self, texts: list[list[int]]) -> list[bool]:
        """For `generate`, which asks whether its only text ends."""
        self.add(texts[0])
        return [False]

    def add(self, tokens: list[int], whole: bool = False) -> None:
        """Prints what is new. whole: whether no more will come."""
        text = self.decode(tokens)
        text = text if whole else text.rstrip(UNFINISHED)
        print(text[self.count :], end="\n" if whole else "", flush=True)
        self.count = max(self.count, len(text))


if __name__ == "__main__":
    run(COMMAND, main)
