"""Refuses data and tokenizers whose ids are other tokens than those of the weights, or that have no weights."""

from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from ssscale.config.schema import Config
from ssscale.data import manifest as manifests
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
    if own is not None and other is not None:
        check_same(own, f"data.path={config.data.path}", other, where)


def check_folders(folders: list[str]) -> None:
    """Raises UserError if two local data folders of a run differ in this way. Those that do not exist yet are left out."""
    texts: dict[str, str] = {}
    for folder in folders:
        with suppress(OSError, UserError, UnicodeDecodeError):  # said when the folder is opened
            manifest = manifests.read(Path(folder) / manifests.NAME)
            texts[folder] = (Path(folder) / manifest["tokenizer"]["file"]).read_text(encoding="utf-8")
    for folder, text in texts.items():
        first = next(iter(texts))
        check_same(text, f"the data folder {folder}", texts[first], first)


def check_same(own: str, data: str, other: str, where: str) -> None:
    """Raises UserError if two tokenizers differ in a token or an id. data, where: what they belong to, for the sentence."""
    if own != other and _tokens(own, data) != _tokens(other, where):
        raise UserError(f"{data} was packed with another tokenizer than {where}: the same ids are other tokens there")


def check_rows(last: int, file: Path, vocab_size: int, config: str) -> None:
    """Raises UserError if a tokenizer has an id that no row of the model's embedding belongs to.

    last: the largest id of the tokenizer `file`. config: where vocab_size stands, for the sentence.
    """
    if last >= vocab_size:
        raise UserError(
            f"{file} has ids up to {last}, but {config} has vocab_size={vocab_size}: resize the model's embedding to"
            f" at least {last + 1} rows, or remove the added tokens from {file.name}"
        )


def _tokens(text: str, where: str) -> dict[str, int]:
    from tokenizers import Tokenizer

    try:
        return dict(Tokenizer.from_str(text).get_vocab(with_added_tokens=True))
    except Exception as error:  # tokenizers raises no specific exception
        raise UserError(f"the tokenizer of {where} is none of the `tokenizers` library: {error}") from error
