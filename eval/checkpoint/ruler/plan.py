"""Reads a request for RULER and prints what its samples are made from."""

from rich.console import Console

from eval.checkpoint.command import whole_numbers
from eval.checkpoint.ruler.data import parse_stand_ins
from eval.checkpoint.ruler.run import Ruler, prepare_ruler
from eval.checkpoint.text import TextTokenizer
from ssscale.errors import UserError


def plan_ruler(
    tasks: list[str],
    lengths: str | None,
    length: int | None,
    limit: int | None,
    eval_data: str,
    stand_in: str | None,
    trained: int,
    tokenizer: TextTokenizer,
    console: Console,
) -> Ruler:
    """Prepare RULER's tasks. Print the sources of the samples and the lengths that exceed the training length.

    lengths, length, limit, stand_in: the options of launch/evaluate.py. trained: the training length. Raises UserError.
    """
    most = length or trained
    asked = sorted(set(whole_numbers(lengths or str(most), "lengths")))
    if length and asked[-1] > most:
        raise UserError(f"lengths={asked[-1]}: the model is given {most:,} tokens at most (length={most})")
    ruler = prepare_ruler(tasks, asked, limit, eval_data, parse_stand_ins(stand_in), tokenizer)
    for name, source in ruler.sources.items():
        console.print(source.sentence(name), highlight=False, soft_wrap=True)
    if longer := ", ".join(f"{number:,}" for number in asked if number > trained):
        console.print(f"lengths beyond the {trained:,} tokens of training: {longer}", highlight=False)
    return ruler
