"""Question answering in the format of SQuAD (arXiv:1806.03822): reads the JSON and makes prompts and batches."""

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import zstandard
from ssscale_kernels.buckets import bucket

from ssscale.data.batch import Batch
from ssscale.data.zstd import decompressed
from ssscale.errors import UserError
from ssscale.layout import IGNORE, PackedLayout

TOKEN_MULTIPLE = 1024  # batches are padded to a multiple of this, so that only a few shapes occur
Encode = Callable[[str], list[int]]


class Question(NamedTuple):
    context: str
    question: str
    answer: str


class Example(NamedTuple):
    """tokens: the prompt, then the answer. prompt: number of tokens of the prompt."""

    tokens: list[int]
    prompt: int


def question_tokens(question: str, encode: Encode) -> list[int]:
    """Returns the tokens between the context and the answer. The papers do not give their format; this is our own."""
    return encode(f"\n\nQuestion: {question.strip()}\nAnswer:")


def make_example(question: Question, encode: Encode, bos_id: int) -> Example:
    """Returns the tokens of BOS, context, question and answer. The answer starts with a space.

    There is no EOS at the end, because EOS is excluded when answers are generated.
    """
    prompt = [bos_id, *encode(question.context.strip()), *question_tokens(question.question, encode)]
    return Example(prompt + encode(" " + question.answer.strip()), len(prompt))


def read_squad(file: Path) -> list[Question]:
    """Returns the questions of FILE.json or FILE.json.zst that have a context, a question and an answer.

    If there are several answers, the first is taken. Raises UserError if the file cannot be read, does not have SQuAD's
    format, or has no such question.
    """
    try:
        with file.open("rb") as raw:
            text = (decompressed(raw) if file.suffix == ".zst" else raw).read()
        questions = list(_questions(json.loads(text)))
    except (OSError, EOFError, zstandard.ZstdError) as error:
        raise UserError(f"questions={file} cannot be read: {error}") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(
            f"questions={file} is not in SQuAD's format (data, paragraphs, qas, answers): {error!r}"
        ) from None
    if not questions:
        raise UserError(f"questions={file} has no question with an answer")
    return questions


def _questions(squad: dict[str, Any]) -> Iterator[Question]:
    for article in squad["data"]:
        for paragraph in article["paragraphs"]:
            for qa in paragraph["qas"]:
                texts = [answer["text"] for answer in qa["answers"]]
                question = Question(paragraph["context"], qa["question"], texts[0] if texts else "")
                # Fails for half of a surrogate pair, which JSON may hold and no tokenizer takes.
                "".join(question).encode()
                if all(part.strip() for part in question):
                    yield question


def make_batch(examples: Sequence[Example], length: int) -> Batch:
    """Joins examples into a batch in which each example is a document. Only the tokens of the answers are targets.

    length: an upper bound on the tokens of an example. Documents of padding, of at most `length` tokens each, fill the
    batch to a multiple of TOKEN_MULTIPLE tokens.
    """
    lengths = [len(example.tokens) for example in examples]
    assert max(lengths) <= length, (max(lengths), length)
    missing = -sum(lengths) % TOKEN_MULTIPLE
    padding = [length] * (missing // length) + ([missing % length] if missing % length else [])
    tokens = [token for example in examples for token in example.tokens] + [0] * missing
    labels = torch.full((len(tokens),), IGNORE)
    start = 0
    for example, size in zip(examples, lengths, strict=True):
        # The last token of the prompt predicts the first token of the answer.
        labels[start + example.prompt - 1 : start + size - 1] = torch.tensor(example.tokens[example.prompt :])
        start += size
    layout = PackedLayout.from_lengths(lengths + padding, max_seqlen=length)
    boundaries = torch.full((bucket(len(layout.cu_seqlens)),), len(tokens), dtype=torch.int32)
    boundaries[: len(layout.cu_seqlens)] = layout.cu_seqlens
    layout = PackedLayout(boundaries, layout.positions, length)
    targets = sum(size - example.prompt for example, size in zip(examples, lengths, strict=True))
    rows = (labels != IGNORE).nonzero().flatten()  # few tokens are targets, so the head computes only these
    return Batch(torch.tensor(tokens), labels, layout, torch.zeros(1, dtype=torch.int64), targets, rows)
