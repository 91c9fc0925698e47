"""Divides the text of the studies into training, validation and test documents, always in the same way.

    python -m eval.papers.study.split TEXT OUT [--test books] [--windows 300] [--length 20000] [--megabytes 30]
        [--take code=0.5 ...]

TEXT has train.NAME.jsonl.zst, valid.NAME.jsonl.zst and tokenizer.json. OUT gets

    test.books.jsonl.zst    documents of train.books, as many as give --windows windows of --length tokens. No training
                            reads them, and learning rates are chosen without them.
    train.NAME.jsonl.zst    the other documents, as many as fit into --megabytes in all
    valid.NAME.jsonl.zst    as in TEXT, and tokenizer.json
    split.json              documents, bytes and the SHA-256 of everything

Documents are taken in the order of the SHA-256 of their text, so the same TEXT gives the same split on every machine.
Every source keeps the same fraction of its documents, unless --take gives its own.
"""

import argparse
import hashlib
import json
import math
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import zstandard

from data_prep.errors import DataError
from eval.checkpoint.command import Parser, sentences, write
from eval.checkpoint.documents import read_documents
from ssscale.errors import UserError

if TYPE_CHECKING:
    from eval.checkpoint.text import TextTokenizer

SPLIT = "split.json"
LEVEL = 19  # of zstd, which is slow to write and no slower to read
MARGIN = 1.02  # the size of compressed text is estimated


class Document(NamedTuple):
    """A text and the SHA-256 of it, in hexadecimal."""

    key: str
    text: str


def documents_of(file: Path) -> list[Document]:
    """Return the documents of a file in the order of their keys."""
    texts = read_documents(file, "TEXT: ")
    return sorted(Document(hashlib.sha256(text.encode()).hexdigest(), text) for text in texts)


def hold_out(
    documents: list[Document], tokenizer: "TextTokenizer", windows: int, length: int
) -> tuple[list[Document], dict[str, int]]:
    """Return the first documents that give `windows` windows of `length` tokens, and their counts.

    Raises UserError if the documents do not give as many.
    """
    found, tokens = 0, 0
    for number, document in enumerate(documents, 1):
        size = len(tokenizer.encode(document.text)) + 2  # BOS and EOS, as in eval.papers.long_context
        found, tokens = found + size // length, tokens + size
        if found >= windows:
            return documents[:number], {"tokens": tokens, "windows": found}
    raise UserError(f"--windows={windows}: the documents give only {found} windows of {length:,} tokens")


def first_share(documents: list[Document], fraction: float) -> list[Document]:
    """Return the first documents whose bytes are at most `fraction` of all."""
    most = fraction * sum(len(document.text.encode()) for document in documents)
    kept, size = [], 0
    for document in documents:
        size += len(document.text.encode())
        if size > most:
            break
        kept.append(document)
    return kept


def write_documents(file: Path, documents: list[Document]) -> dict[str, Any]:
    """Write JSON lines as .zst. Returns documents, bytes of the file, and the SHA-256 of the keys."""
    text = "".join(json.dumps({"text": document.text}, ensure_ascii=False) + "\n" for document in documents)
    packed = zstandard.ZstdCompressor(level=LEVEL).compress(text.encode())
    file.write_bytes(packed)
    keys = hashlib.sha256("".join(document.key for document in documents).encode()).hexdigest()
    return {"documents": len(documents), "bytes": len(packed), "sha256": keys}


def fractions(
    sizes: dict[str, float], megabytes: float, held: int, fixed: dict[str, float]
) -> Iterator[tuple[str, float]]:
    """Yield (source, fraction of its documents to keep), so that the sizes in bytes sum to at most `megabytes`.

    held: bytes of the test and validation documents, which count too. Raises UserError if these and the fixed fractions
    alone exceed `megabytes`.
    """
    room = megabytes * 1e6 - held - sum(sizes[name] * share for name, share in fixed.items())
    if room < 0:
        more = math.ceil(-room / 1e5) / 10
        raise UserError(f"--megabytes={megabytes:g}: test, validation and --take need {more:.1f} MB more")
    others = sum(size for name, size in sizes.items() if name not in fixed)
    for name in sizes:
        yield name, fixed.get(name, min(1.0, room / others) if others else 1.0)


def split(text: Path, out: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Write the split and return the content of split.json. Raises UserError for missing files and bad options."""
    from data_prep.tokenize import describe
    from eval.checkpoint.text import TextTokenizer  # imports torch, which takes seconds

    train = {file.name.split(".")[1]: file for file in sorted(text.glob("train.*.jsonl.zst"))}
    valid = sorted(text.glob("valid.*.jsonl.zst"))
    fixed = taken(options.take, set(train))
    if options.test not in train or not valid or not (text / "tokenizer.json").is_file():
        raise UserError(f"{text} must have train.{options.test}.jsonl.zst, valid.NAME.jsonl.zst and tokenizer.json")
    out.mkdir(parents=True, exist_ok=True)
    (out / SPLIT).unlink(missing_ok=True)  # an interrupted split is not whole
    for file in [*valid, text / "tokenizer.json"]:
        shutil.copyfile(file, out / file.name)
    try:
        info = describe(str(text / "tokenizer.json"))
    except DataError as error:
        raise UserError(str(error)) from error
    tokenizer = TextTokenizer(str(text / "tokenizer.json"), info.bos_id, info.eos_id)
    documents = {name: documents_of(file) for name, file in train.items()}
    held, counts = hold_out(documents[options.test], tokenizer, options.windows, options.length)
    test = write_documents(out / f"test.{options.test}.jsonl.zst", held) | counts
    raw = {name: sum(len(document.text.encode()) for document in some) for name, some in documents.items()}
    documents[options.test] = documents[options.test][len(held) :]
    # The files of TEXT may be compressed better than at LEVEL.
    share = sum(len(document.text.encode()) for document in held) / max(1, raw[options.test])
    denser = MARGIN * test["bytes"] / max(1.0, train[options.test].stat().st_size * share)
    sizes: dict[str, float] = {}
    for name, some in documents.items():
        left = sum(len(document.text.encode()) for document in some)
        sizes[name] = denser * train[name].stat().st_size * left / max(1, raw[name])
    both = test["bytes"] + sum(file.stat().st_size for file in valid)
    kept = dict(fractions(sizes, options.megabytes, both, fixed))
    result = {
        "length": options.length,
        "test": {options.test: test},
        "train": {
            name: write_documents(out / f"train.{name}.jsonl.zst", first_share(some, kept[name]))
            for name, some in documents.items()
        },
        "valid": {file.name.split(".")[1]: hashlib.sha256(file.read_bytes()).hexdigest() for file in valid},
    }
    result["sha256"] = hashlib.sha256(json.dumps(result, sort_keys=True).encode()).hexdigest()
    write(out / SPLIT, result, indent=1)
    return result


def taken(texts: list[str], names: set[str]) -> dict[str, float]:
    """Parse --take NAME=FRACTION. Raises UserError for an unknown source or a fraction that is not from 0 to 1."""
    found = {}
    for text in texts:
        name, _, fraction = text.partition("=")
        try:
            found[name] = float(fraction)
        except ValueError:
            found[name] = -1.0
        if name not in names or not 0 <= found[name] <= 1:
            raise UserError(f"--take {text}: give a source ({', '.join(sorted(names))}) and a fraction from 0 to 1")
    return found


def main() -> None:
    parser = Parser(
        "python -m eval.papers.study.split", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("text", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--test", default="books", help="the source that test documents are taken from")
    parser.add_argument("--windows", type=int, default=300)
    parser.add_argument("--length", type=int, default=20_000, help="tokens per window")
    parser.add_argument("--megabytes", type=float, default=30.0, help="compressed size of all documents")
    parser.add_argument("--take", action="append", default=[], metavar="NAME=FRACTION")
    options = parser.parse_args()
    with sentences():
        if options.text.resolve() == options.out.resolve():
            raise UserError(f"{options.out} must be another folder than TEXT")
        found = split(options.text, options.out, options)
        for kind in ("test", "train"):
            for name, counts in found[kind].items():
                print(
                    f"{kind}.{name}: "
                    + ", ".join(f"{value:,} {key}" for key, value in counts.items() if key != "sha256")
                )


if __name__ == "__main__":
    with sentences():
        main()
