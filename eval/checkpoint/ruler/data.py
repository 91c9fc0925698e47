"""Finds the source texts of RULER's tasks: copies of the originals, or stand-ins.

The use of a stand-in is always reported in the output and in the results.
"""

import hashlib
import inspect
import json
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import datasets
import zstandard

from eval.checkpoint.documents import read_documents
from eval.checkpoint.lm_eval_patches import download_gives
from eval.checkpoint.ruler.offline import qa_utils
from eval.checkpoint.tasks.local.files import find
from ssscale.data.zstd import decompressed
from ssscale.errors import UserError

Questions = tuple[
    list[dict[str, Any]], list[str]
]  # lm-eval's format: questions with the indices of their documents; documents


@dataclass(frozen=True)
class Origin:
    """A text that lm-eval downloads.

    file: path of a copy, relative to eval_data.
    copy_of: the name of the original.
    stand_in: path of a text that replaces it, relative to eval_data. It is used if there is no copy.
    form: the file format, for messages.
    """

    file: str
    copy_of: str
    stand_in: str | None
    form: str


ORIGINS = {
    "essays": Origin(
        "paul_graham_essays/train.jsonl",
        "baber/paul_graham_essays, train",
        "books/valid.jsonl",
        "any long text, such as held-out books: JSON lines with `text`, or plain text",
    ),
    "squad": Origin(
        "squad/dev-v2.0.json",
        "dev-v2.0.json of rajpurkar.github.io/SQuAD-explorer",
        "squadshifts/new_wiki_v1.0.json",
        "JSON in SQuAD's format",
    ),
    "hotpotqa": Origin(
        "hotpotqa/hotpot_dev_distractor_v1.json",
        "hotpot_dev_distractor_v1.json of hotpotqa.github.io",
        None,
        "JSON in HotpotQA's format, or in SQuAD's, whose questions need only one document",
    ),
}


@dataclass(frozen=True)
class Source:
    """A file that samples were made from. stand_in_for: the original that it replaces, None for a copy of it."""

    file: str
    sha256: str
    stand_in_for: str | None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def sentence(self, name: str) -> str:
        return f"{name}: {self.file}" + (f" STANDS IN for {self.stand_in_for}" if self.stand_in_for else "")


def parse_stand_ins(text: str | None) -> dict[str, Path]:
    """Parse `essays:FILE,hotpotqa:FILE`. Raises UserError for a bad format, an unknown name or a missing file."""
    found: dict[str, Path] = {}
    for part in text.split(",") if text else ():
        name, colon, file = part.partition(":")
        if not colon or not file or name not in ORIGINS:
            raise UserError(f"stand_in={part}: it must be NAME:FILE, with NAME one of {', '.join(ORIGINS)}")
        if not Path(file).is_file():
            raise UserError(f"stand_in={part}: there is no such file")
        found[name] = Path(file)
    return found


def download(name: str, file: Path) -> None:
    """Download an original from lm-eval's source to `file`. Raises UserError if this fails."""
    try:
        if name == "essays":
            texts = datasets.load_dataset("baber/paul_graham_essays", split="train")["text"]
            content = "".join(json.dumps({"text": text}) + "\n" for text in texts)
        else:
            reader = qa_utils.read_squad if name == "squad" else qa_utils.read_hotpotqa
            content = json.dumps(qa_utils.download_json(inspect.signature(reader).parameters["url"].default))
        file.parent.mkdir(parents=True, exist_ok=True)
        temporary = file.with_name(f"{file.name}.{os.getpid()}.tmp")  # several ranks may download the same file
        temporary.write_text(content, encoding="utf-8")
        os.replace(temporary, file)
    except (OSError, ValueError) as error:
        raise UserError(f"{ORIGINS[name].copy_of} cannot be downloaded to {file}: {error}") from None


def find_sources(needed: list[str], eval_data: str, stand_ins: dict[str, Path]) -> dict[str, tuple[Path, Source]]:
    """Return the file and its description for each name in `needed`.

    A stand-in of the user comes first, then the copy in the folder, then the stand-in in the folder. With
    HF_HUB_OFFLINE=0 in the environment, a missing copy is downloaded.

    Raises UserError that lists all missing files, their origins and possible stand-ins.
    """
    found, missing = {}, []
    for name in needed:
        origin = ORIGINS[name]
        copy = None if name in stand_ins else find(eval_data, origin.file)
        if not copy and name not in stand_ins and os.environ.get("HF_HUB_OFFLINE") == "0":
            copy = Path(eval_data) / origin.file
            download(name, copy)
        other = stand_ins.get(name) or (find(eval_data, origin.stand_in) if origin.stand_in else None)
        file = copy or other
        if file is None:
            places = f"{eval_data}/{origin.file} (a copy of {origin.copy_of})"
            missing.append(f"{places}, or a replacement with stand_in={name}:FILE ({origin.form})")
            continue
        shown = str(file.relative_to(eval_data)) if file.is_relative_to(eval_data) else file.name
        digest = hashlib.sha256(file.read_bytes()).hexdigest()
        found[name] = (file, Source(shown, digest, None if copy else origin.copy_of))
    if missing:
        raise UserError(
            f"RULER's data is missing: {'; '.join(missing)}. Or select tasks that do not need it with tasks="
        )
    return found


def read_essays(file: Path) -> list[str]:
    """Return the words of all documents in sequence."""
    return " ".join(read_documents(file, "stand_in=essays:")).split()


def read_questions(file: Path) -> Questions:
    """Read a file in the format of SQuAD (1.1 or 2.0) or HotpotQA with lm-eval's readers.

    Raises UserError if it has neither format or no question with an answer.
    """
    try:
        with file.open("rb") as raw:
            content = json.loads((decompressed(raw) if file.suffix == ".zst" else raw).read())
        read: Callable[..., Questions] = qa_utils.read_hotpotqa.__wrapped__
        if isinstance(content, dict):
            read = qa_utils.read_squad.__wrapped__
            for article in content["data"]:
                for paragraph in article["paragraphs"]:
                    for question in paragraph["qas"]:
                        question.setdefault("is_impossible", False)  # SQuAD 1.1 lacks this key
        with download_gives(content):
            questions, documents = read(os.fspath(file))
    except (OSError, EOFError, zstandard.ZstdError) as error:
        raise UserError(f"{file} cannot be read: {error}") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{file} is neither in SQuAD's nor in HotpotQA's format: {error!r}") from None
    answered = [question for question in questions if question["outputs"]]
    if not answered:
        raise UserError(f"{file} has no question with an answer")
    return answered, documents
