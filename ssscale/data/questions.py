"""Question answering in the form of SQuAD (arXiv:1806.03822): its JSON to prompts with answers, and these to batches."""

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import zstandard
from ssscale_kernels.buckets import bucket

from ssscale.data.batch import IGNORE, Batch
from ssscale.errors import UserError
from ssscale.layout import PackedLayout

TOKEN_MULTIPLE = 1024  # a batch is filled up to a multiple of this, so that few shapes serve all
Encode = Callable[[str], list[int]]


class Question(NamedTuple):
    context: str
    question: str
    answer: str


class Example(NamedTuple):
    """tokens: prompt and answer. prompt: how many of them are the prompt's."""

    tokens: list[int]
    prompt: int


def question_tokens(question: str, encode: Encode) -> list[int]:
    """What stands between the context and the answer. The papers do not give their form; this one is ours."""
    return encode(f"\n\nQuestion: {question.strip()}\nAnswer:")


def make_example(question: Question, encode: Encode, bos_id: int) -> Example:
    """[BOS] context, question, answer; the answer's tokens begin with a space. No token ends it: generation leaves EOS out."""
    prompt = [bos_id, *encode(question.context.strip()), *question_tokens(question.question, encode)]
    return Example(prompt + encode(" " + question.answer.strip()), len(prompt))


def read_squad(file: Path) -> list[Question]:
    """The questions of FILE.json[.zst] that have a context, a question and an answer; of several answers the first.

    Raises UserError for a file that is not of this form, or has none.
    """
    try:
        raw = file.read_bytes()
        text = zstandard.ZstdDecompressor().stream_reader(raw).read() if file.suffix == ".zst" else raw
        questions = list(_questions(json.loads(text)))
    except (OSError, zstandard.ZstdError) as error:
        raise UserError(f"questions={file} cannot be read: {error}") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(f"questions={file} has not SQuAD's form (data, paragraphs, qas, answers): {error!r}") from None
    if not questions:
        raise UserError(f"questions={file} has no question with an answer")
    return questions


def _questions(squad: dict[str, Any]) -> Iterator[Question]:
    for article in squad["data"]:
        for paragraph in article["paragraphs"]:
            for qa in paragraph["qas"]:
                texts = [answer["text"] for answer in qa["answers"]]
                question = Question(paragraph["context"], qa["question"], texts[0] if texts else "")
                if all(part.strip() for part in question):
                    yield question


def make_batch(examples: Sequence[Example], length: int) -> Batch:
    """Examples as documents one behind the other, without padding between; only the answers' tokens are targets.

    length: an upper bound on an example's tokens. Documents of at most `length` padding tokens fill the batch up.
    """
    lengths = [len(example.tokens) for example in examples]
    assert max(lengths) <= length, (max(lengths), length)
    missing = -sum(lengths) % TOKEN_MULTIPLE
    padding = [length] * (missing // length) + ([missing % length] if missing % length else [])
    tokens = [token for example in examples for token in example.tokens] + [0] * missing
    labels = torch.full((len(tokens),), IGNORE)
    start = 0
    for example, size in zip(examples, lengths, strict=True):
        # The token before the answer predicts its first one.
        labels[start + example.prompt - 1 : start + size - 1] = torch.tensor(example.tokens[example.prompt :])
        start += size
    layout = PackedLayout.from_lengths(lengths + padding, max_seqlen=length)
    boundaries = torch.full((bucket(len(layout.cu_seqlens)),), len(tokens), dtype=torch.int32)
    boundaries[: len(layout.cu_seqlens)] = layout.cu_seqlens
    layout = PackedLayout(boundaries, layout.positions, length)
    targets = sum(size - example.prompt for example, size in zip(examples, lengths, strict=True))
    rows = (labels != IGNORE).nonzero().flatten()  # few tokens are targets: the head computes no others
    return Batch(torch.tensor(tokens), labels, layout, torch.zeros(1, dtype=torch.int64), targets, rows)
