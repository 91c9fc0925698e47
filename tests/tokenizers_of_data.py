"""Changes the tokenizer of a copied data folder, whose manifest is signed again."""

import json
from hashlib import sha256
from pathlib import Path

from data_prep.write_shards import checksum


def exchange_tokens(folder: Path) -> None:
    """Exchanges the ids of two tokens. As many tokens as before."""
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    a, b = list(vocabulary)[300:302]
    vocabulary[a], vocabulary[b] = vocabulary[b], vocabulary[a]
    _write(folder, json.dumps(tokenizer))


def write_in_another_form(folder: Path) -> None:
    """The same tokenizer."""
    _write(folder, json.dumps(json.loads((folder / "tokenizer.json").read_text()), indent=1))


def _write(folder: Path, text: str) -> None:
    (folder / "tokenizer.json").write_text(text)
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["tokenizer"]["sha256"] = sha256((folder / "tokenizer.json").read_bytes()).hexdigest()
    manifest["checksum"] = checksum(manifest)
    (folder / "manifest.json").write_text(json.dumps(manifest))
