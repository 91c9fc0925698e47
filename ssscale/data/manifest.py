"""Reads and checks the manifest of a data folder (docs/reference/data_format.md) and computes its fingerprint."""

import hashlib
import json
from pathlib import Path
from typing import Any

from ssscale.errors import UserError
from ssscale.names import bad_name

FORMAT = "ssscale-packed"
VERSION = 1
NAME = "manifest.json"


def read(file: Path) -> dict[str, Any]:
    """Returns the content of a manifest.

    Raises UserError if the file is broken, has another format, or names a file outside its folder.
    """
    try:
        manifest = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{file} is broken: {error}") from error
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise UserError(f"{file} is not the manifest of a data folder (its format is not {FORMAT!r})")
    if manifest.get("version") != VERSION:
        raise UserError(f"{file} has format version {manifest.get('version')}, this program reads {VERSION}")
    content = {key: value for key, value in manifest.items() if key != "checksum"}
    if _sha256(content) != manifest.get("checksum"):
        raise UserError(f"{file} is corrupt: its checksum does not match")
    try:
        found = bad_name(manifest)
        _check_form(manifest)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise UserError(f"{file} does not have the form of a manifest: {error!r}") from error
    if found is not None:
        raise UserError(f"{file} cannot be trusted: {found}, which is not the name of a file in its folder")
    return manifest


def _check_form(manifest: dict[str, Any]) -> None:
    """Raises KeyError, TypeError or ValueError if a manifest with a correct checksum was not written by data_prep."""
    tokenizer = manifest["tokenizer"]
    numbers = [manifest["length"], tokenizer["vocab_size"], tokenizer["bos_id"], tokenizer["eos_id"]]
    texts = [tokenizer["sha256"]]
    for entry in manifest["files"].values():
        numbers.append(entry["bytes"])
        texts.append(entry["sha256"])
    for split, sources in manifest["splits"].items():
        for source, counts in sources.items():
            numbers += [counts[key] for key in ("rows", "documents", "bytes", "tokens_in")]
            if counts["rows"]:
                manifest["files"][f"{split}/{source}/index.json"]
    wrong = [number for number in numbers if type(number) is not int or number < 0]
    wrong += [text for text in texts if not isinstance(text, str)]
    if wrong:
        raise ValueError(f"{wrong[0]!r} is not a valid count or sha256")


def open_checked(
    path: str, folder: Path, vocab_size: int | None = None, length: int | None = None, hint: str | None = None
) -> dict[str, Any]:
    """Returns the manifest of the data folder `path`, whose files lie in `folder` (its cache if it is remote).

    vocab_size: of the model; length: tokens per row of the run. None skips the check.
    hint: tells in the error how to make the folder.
    Raises UserError if the folder is missing, unfinished or broken, if its tokenizer has more than vocab_size entries, or
    if its rows have another length.
    """
    file = folder / NAME
    if not file.is_file():
        if (folder / "config.yaml").is_file():
            raise UserError(f"data folder {path} is that of a run: name one that `python -m data_prep pack` has made")
        empty = "does not exist"
        if folder.exists():
            empty = "is empty or unfinished" if folder.is_dir() else "is a file"
        raise UserError(f"data folder {path} {empty}: {hint or _how_to_make(path, length)}")
    manifest = read(file)
    have = manifest["tokenizer"]["vocab_size"]
    if vocab_size is not None and have > vocab_size:
        raise UserError(
            f"{path} was tokenized with a vocabulary of {have:,}, but model.vocab_size={vocab_size} has no rows for ids from"
            f" {vocab_size} on: set model.vocab_size={have}, or pack with a tokenizer of at most {vocab_size:,} entries"
        )
    if length is not None and length != manifest["length"]:
        raise UserError(f"{path} was packed to rows of {manifest['length']} tokens, but data.length={length}")
    return manifest


def sources(manifest: dict[str, Any], path: str, split: str, hint: str | None = None) -> list[str]:
    """Returns the sources that have rows in a split. Raises UserError, with `hint`, if there are none."""
    found = [name for name, counts in manifest["splits"].get(split, {}).items() if counts["rows"]]
    if not found:
        raise UserError(f"{path} has no rows in its split {split!r}: {hint or _how_to_make(path, manifest['length'])}")
    return found


def _how_to_make(path: str, length: int | None) -> str:
    return (
        f"make it with `python -m data_prep pack --out {path} --length {length or 4096}"
        " --tokenizer FILE --source NAME=PATH` (docs/guide/data.md)"
    )


def fingerprint(manifest: dict[str, Any]) -> str:
    """Returns a SHA-256 of all that determines the rows: tokenizer, row length and shards, but not where they came from."""
    shards = {
        name: entry["sha256"] for name, entry in manifest["files"].items() if name != manifest["tokenizer"]["file"]
    }
    return _sha256({"tokenizer": manifest["tokenizer"], "length": manifest["length"], "shards": shards})


def _sha256(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
