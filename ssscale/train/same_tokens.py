"""Refuses data whose ids are other tokens than those that the weights were trained with."""

from pathlib import Path
from typing import TYPE_CHECKING

from ssscale.config.schema import Config
from ssscale.errors import UserError

if TYPE_CHECKING:
    from ssscale.train.run import Source

TOKENIZER = "tokenizer.json"


def saved_tokenizer(checkpoint: Path) -> str | None:
    """Returns the tokenizer of a checkpoint, or None if it has none. Raises UserError if it cannot be read."""
    try:
        return (checkpoint / TOKENIZER).read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{checkpoint / TOKENIZER} cannot be read: {error}") from error


def check_tokenizer(source: "Source", other: str | None, where: str, config: Config) -> None:
    """Raises UserError if the data of a run was packed with another vocabulary.

    other: the tokenizer.json of what the weights were trained on, or None if it is unknown. where: its place, for the
    sentence. Only the tokens and their ids are compared, because versions of `tokenizers` write the same tokenizer in
    different forms.
    """
    own = source.files().get(TOKENIZER)
    if own is None or other is None or own == other:
        return
    if _tokens(own, config.data.path) != _tokens(other, where):
        raise UserError(
            f"data.path={config.data.path} was packed with another tokenizer than {where}: the weights know its ids as "
            "other tokens"
        )


def _tokens(text: str, where: str) -> dict[str, int]:
    from tokenizers import Tokenizer

    try:
        return dict(Tokenizer.from_str(text).get_vocab(with_added_tokens=True))
    except Exception as error:  # tokenizers raises no specific exception
        raise UserError(f"the tokenizer of {where} is none of the `tokenizers` library: {error}") from error
