"""Computes the loss on contexts longer than in training, by position and by length.

    python -m eval.papers.long_context RUN [RUN ...] --texts FILE[.zst] [--lengths 20000] [--windows 100] [--join]
        [model.position.rope.base=500000 ...]

--texts names a .jsonl file with one document per line (key `text` or `page`). Any other file is read as plain text and is
one document. Both may be compressed as .zst.

Documents are cut into windows of the longest length, without overlap. The rest of a document is dropped. --join reads
all documents as one, each with its boundary tokens. Shorter lengths divide the same windows into more pieces. So all
lengths have the same targets, except the first token of each piece, which no length counts. Every model reads the
same windows.

Figure 5 of arXiv:2501.19399 is the loss by position at --lengths 20000 with 50 times RoPE's base. Figure 5 of
arXiv:2410.17980 is the loss at --lengths 2048,4096,...,65536. model.* keys are changed for this evaluation only.

The command prints a table and writes RUN/eval/[CHANGES/]long_context-step-XXXXXXXX.json after each length. If it was
stopped, the same command continues. Then draw the figures with `python -m eval.papers.figures loss_by_position RUN ...`
and `extrapolation RUN ...`.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from eval.checkpoint.command import begun, sentences, whole_numbers, write
from eval.checkpoint.documents import read_documents
from eval.checkpoint.environment import prepare
from eval.checkpoint.results import results_file, run_folder
from eval.checkpoint.text import TextTokenizer
from ssscale.errors import UserError
from ssscale.layout import PackedLayout
from ssscale.model.decoder import Decoder
from ssscale.parallel.groups import initialize
from ssscale.train.build import load_model
from ssscale.train.reading import reading

CHANGEABLE = ("model.mixers", "model.mixer.", "model.position.")
BINS = 200  # maximum number of bins per window
PASS_TOKENS = 65_536  # tokens per forward pass, or one piece. All their logits are in memory at once.


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
        labels = torch.full_like(tokens, -100)
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


def evaluate(run: Path, changes: list[str], arguments: argparse.Namespace, lengths: list[int]) -> Path:
    """Evaluate one run at all lengths. Returns the result file."""
    groups = initialize()
    with reading(run, groups, "RUN") as checkpoint:
        model, config = load_model(checkpoint, groups, changes=changes)
        tokenizer = TextTokenizer.of_checkpoint(checkpoint, None)
    file = results_file(checkpoint, changes)
    file = file.with_name(f"long_context-{file.name}")
    windows = cut_windows(read_documents(arguments.texts), tokenizer, lengths[-1], arguments.windows, arguments.join)
    settings: dict[str, Any] = {
        "kind": "long_context",
        "run": run_folder(checkpoint).resolve().name,
        "checkpoint": checkpoint.name,
        "changes": changes,
        "texts": arguments.texts.name,
        "joined": arguments.join,
        "asked": [lengths, arguments.windows],
        "train_length": config.data.length,
    }
    result = {"lengths": {}} | begun(file, settings)
    for length in lengths:
        if str(length) not in result["lengths"]:
            result["lengths"][str(length)] = summarise(losses(model, windows, length, lengths[0]))
            write(file, result)
        found = result["lengths"][str(length)]
        print(
            f"{result['run']} {' '.join(changes)} {length}: {found['mean']:.4f} nats, {found['windows']} windows",
            flush=True,
        )
    return file


def parse_lengths(text: str) -> list[int]:
    """Parse --lengths into ascending order. Raises UserError if the lengths do not divide each other as needed."""
    lengths = sorted(set(whole_numbers(text, "--lengths")))
    if lengths[0] < 2 or any(lengths[-1] % length for length in lengths) or any(n % lengths[0] for n in lengths):
        raise UserError(
            f"--lengths={text}: each must be at least 2, divide the longest and be a multiple of the shortest"
        )
    return lengths


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", help="runs or checkpoints, and model.* keys to change")
    parser.add_argument(
        "--texts", type=Path, required=True, help="a .jsonl file, or a text file as one document; also .zst"
    )
    parser.add_argument("--lengths", default="20000", help="comma-separated context lengths in tokens")
    parser.add_argument("--windows", type=int, default=100, help="maximum number of windows of the longest length")
    parser.add_argument("--join", action="store_true", help="read all documents as one")
    arguments = parser.parse_intermixed_args()
    changes = [text for text in arguments.runs if text.startswith(CHANGEABLE)]
    prepare()
    with sentences():
        if arguments.windows < 1:
            raise UserError(f"--windows must be at least 1, not {arguments.windows}")
        lengths = parse_lengths(arguments.lengths)
        for run in arguments.runs:
            if run not in changes:
                print(evaluate(Path(run), changes, arguments, lengths))


if __name__ == "__main__":
    with sentences():
        main()
