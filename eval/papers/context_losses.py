"""Losses of models on contexts longer than in training (eval.papers.long_context)."""

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from eval.checkpoint.command import begun, write
from eval.checkpoint.documents import read_documents
from eval.checkpoint.results import results_file
from eval.checkpoint.text import TextTokenizer
from eval.papers.parts import Parts, Share
from eval.papers.runs import described
from ssscale.errors import UserError
from ssscale.layout import IGNORE, PackedLayout
from ssscale.model.decoder import Decoder
from ssscale.parallel.groups import initialize
from ssscale.train.build import load_model
from ssscale.train.checkpoint_folder import saved_config
from ssscale.train.reading import reading

BINS = 200  # maximum number of bins per window
PASS_TOKENS = 65_536  # tokens per forward pass, or one piece. All their logits are in memory at once.
PART = 12  # windows or articles per part: four passes at 20,000 tokens


def cut_windows(texts: Iterator[str], tokenizer: TextTokenizer, length: int, most: int, join: bool) -> np.ndarray:
    """Cut documents into windows, [windows, length] int64.

    The first windows of all documents come first, then the second ones, and so on. So even a few windows come from many
    documents.

    most: maximum number of windows.
    join: read all documents as one.

    Raises UserError if no document has `length` tokens.
    """
    documents = [[tokenizer.bos_id, *tokenizer.encode(text), tokenizer.eos_id] for text in texts]
    if join:
        documents = [[token for document in documents for token in document]]
    longest = max((len(document) for document in documents), default=0)
    if longest < length:
        hint = "" if join else "; --join reads all documents as one"
        raise UserError(f"--lengths={length} is longer than the longest document, {longest:,} tokens{hint}")
    windows = []
    for first in range(0, longest, length):
        whole = [document for document in documents if len(document) >= first + length]
        windows += [document[first : first + length] for document in whole]
    return np.array(windows[:most], dtype=np.int64)


@torch.no_grad()
def losses(model: Decoder, windows: np.ndarray, length: int, shortest: int) -> np.ndarray:
    """Return the loss of each token in nats, [windows, tokens of a window] float32.

    The windows are read in pieces of `length` tokens. The first token of every piece of `shortest` tokens is NaN,
    because not all lengths predict it. Raises UserError if a pass does not fit into the GPU's memory.
    """
    device, size = model.groups.device, windows.shape[1]
    at_once = max(1, PASS_TOKENS // length)
    pieces = windows.reshape(-1, length)
    found = np.full(pieces.shape, np.nan, np.float32)
    for first in range(0, len(pieces), at_once):
        tokens = torch.from_numpy(pieces[first : first + at_once]).to(device)
        labels = torch.full_like(tokens, IGNORE)
        labels[:, :-1] = tokens[:, 1:]
        layout = PackedLayout.from_lengths([length] * len(tokens)).to(device)
        try:
            loss: Tensor = model(tokens.flatten(), layout, labels.flatten()).unflatten(0, tokens.shape)
        except torch.OutOfMemoryError:
            raise UserError(
                f"--lengths: {tokens.numel():,} tokens in one pass do not fit into the GPU's memory"
            ) from None
        found[first : first + at_once, 1:] = loss[:, :-1].float().cpu().numpy()
    found = found.reshape(len(windows), size)
    found[:, ::shortest] = np.nan
    return found


def summarise(found: np.ndarray) -> dict[str, Any]:
    """Return the result of one length: the mean loss, and the mean of each bin of each window."""
    size = found.shape[1]
    bins = max(b for b in range(1, min(BINS, size // 2) + 1) if size % b == 0)
    means = np.nanmean(found.reshape(len(found), bins, -1), -1)
    return {
        "windows": len(found),
        "targets": int(np.isfinite(found).sum()),
        "mean": float(np.nanmean(found, dtype=np.float64)),
        "bin": size // bins,
        "losses": [[round(float(x), 4) for x in row] for row in means],
    }


def read_articles(file: Path, tokenizer: TextTokenizer) -> list[np.ndarray]:
    """Return the documents of --articles, each BOS and its tokens, int64. A document without a token is left out."""
    from lm_eval.tasks.wikitext.preprocess_wikitext import wikitext_detokenizer

    texts = [wikitext_detokenizer({"page": text}) for text in read_documents(file)]
    found = [np.array([tokenizer.bos_id, *tokenizer.encode(text)], dtype=np.int64) for text in texts]
    return [document for document in found if len(document) > 1]


@torch.no_grad()
def article_losses(model: Decoder, documents: Sequence[np.ndarray], length: int) -> list[float]:
    """Return the sum of the losses of each document's tokens but the first, in nats.

    Piece k of a document reads its tokens k · length to (k + 1) · length − 1, and predicts the token after each.
    """
    sums = [0.0] * len(documents)
    pieces = [(i, first) for i, document in enumerate(documents) for first in range(0, len(document) - 1, length)]
    while pieces:
        some: list[tuple[int, np.ndarray]] = []
        while pieces and sum(len(piece) - 1 for _, piece in some) + length <= max(length, PASS_TOKENS):
            index, first = pieces.pop(0)
            some.append((index, documents[index][first : first + length + 1]))
        device = model.groups.device
        tokens = torch.from_numpy(np.concatenate([piece[:-1] for _, piece in some])).to(device)
        labels = torch.from_numpy(np.concatenate([piece[1:] for _, piece in some])).to(device)
        lengths = [len(piece) - 1 for _, piece in some]
        found: Tensor = model(tokens, PackedLayout.from_lengths(lengths).to(device), labels)
        for (index, _), losses_of_piece in zip(some, found.double().cpu().split(lengths), strict=True):
            sums[index] += float(losses_of_piece.sum())
    return sums


def summarise_articles(sums: Sequence[float], documents: Sequence[np.ndarray]) -> dict[str, Any]:
    """Return the result of one length of --articles: the mean loss of all tokens, and of each article."""
    counts = [len(document) - 1 for document in documents]
    means = [round(total / count, 4) for total, count in zip(sums, counts, strict=True)]
    return {"windows": len(counts), "targets": sum(counts), "mean": sum(sums) / sum(counts), "losses": means}


def merged(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the result of all windows of one length from the results of its parts."""
    targets = sum(part["targets"] for part in parts)
    return parts[0] | {
        "windows": sum(part["windows"] for part in parts),
        "targets": targets,
        "mean": sum(part["mean"] * part["targets"] for part in parts) / targets,
        "losses": [row for part in parts for row in part["losses"]],
    }


class Evaluation:
    """The evaluation of one run with one set of changed keys. Model and windows are loaded when a part is computed."""

    def __init__(self, run: Path, changes: list[str], arguments: argparse.Namespace, lengths: list[int]) -> None:
        self.changes, self.arguments, self.lengths = changes, arguments, lengths
        self.model: Decoder | None = None
        self.windows: Sequence[np.ndarray] = ()
        self.groups = initialize()
        with reading(run, self.groups, "RUN") as self.checkpoint:
            train_length = saved_config(self.checkpoint).data.length
        kind = "articles" if arguments.articles else "long_context"
        file = results_file(self.checkpoint, changes)
        self.file = file.with_name(f"{kind}-{file.name}")
        self.settings: dict[str, Any] = {
            **described(kind, self.checkpoint, changes, arguments.texts),
            "joined": arguments.join,
            "asked": [lengths, arguments.windows],
            "train_length": train_length,
        }
        self.parts = Parts(self.file, self.settings)

    def load(self) -> Decoder:
        if self.model is None:
            self.model, _ = load_model(self.checkpoint, self.groups, changes=self.changes)
            tokenizer, texts = TextTokenizer.of_checkpoint(self.checkpoint, None), self.arguments.texts
            if self.arguments.articles:
                self.windows = read_articles(texts, tokenizer)[: self.arguments.windows]
            else:
                documents, most = read_documents(texts), self.arguments.windows
                self.windows = list(cut_windows(documents, tokenizer, self.lengths[-1], most, self.arguments.join))
            self.parts.put("windows", len(self.windows))
        return self.model

    def names(self, length: int) -> list[tuple[str, int]]:
        """Return (name, first window) of each part of a length."""
        if (count := self.parts.get("windows")) is None:
            self.load()
            count = len(self.windows)
        return [(f"{length}-{first}", first) for first in range(0, count, PART)]

    def compute(self, length: int, share: Share) -> list[dict[str, Any]]:
        """Compute the missing parts of a share of one length. Returns all of the share's parts."""
        found = []
        for name, first in share.of(self.names(length)):
            part = self.parts.get(name)
            if part is None:
                model = self.load()
                some = self.windows[first : first + PART]
                if self.arguments.articles:
                    part = summarise_articles(article_losses(model, some, length), some)
                else:
                    part = summarise(losses(model, np.asarray(some), length, self.lengths[0]))
                self.parts.put(name, part)
            found.append(part)
        return found

    def run(self) -> Path:
        """Compute what is missing and write the result. Returns the result file."""
        result = {"lengths": {}} | begun(self.file, self.settings)
        for length in self.lengths:
            if str(length) not in result["lengths"]:
                result["lengths"][str(length)] = merged(self.compute(length, Share()))
                write(self.file, result)
            found = result["lengths"][str(length)]
            print(
                f"{result['run']} {' '.join(self.changes)} {length}: {found['mean']:.4f} nats, {found['windows']} windows",
                flush=True,
            )
        self.parts.clear()
        return self.file
