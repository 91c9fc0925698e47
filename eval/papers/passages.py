"""Measures whether models use a passage far back in their context (eval.papers.repeats)."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from eval.checkpoint.command import begun, write
from eval.checkpoint.documents import read_documents
from eval.checkpoint.results import results_file
from eval.checkpoint.text import TextTokenizer
from eval.papers.context_losses import PASS_TOKENS
from eval.papers.retrieval import Haystack
from eval.papers.runs import described
from ssscale.errors import UserError
from ssscale.layout import PackedLayout
from ssscale.model.decoder import Decoder
from ssscale.parallel.groups import initialize
from ssscale.train.build import load_model
from ssscale.train.reading import reading

CUE, MEASURED = 16, 32
PASSAGE = CUE + MEASURED  # tokens


class Prompt(NamedTuple):
    """A text that ends with a passage. start: the token at which the passage begins in it for the first time, or None."""

    tokens: list[int]
    start: int | None


def draw_prompt(haystack: Haystack, length: int, depth: int | None, sample: int) -> Prompt:
    """Return a prompt of `length` tokens: BOS, text with the passage in it, and the passage.

    The passage depends on `sample` only, so that all lengths have the same targets. The text depends on `sample` and
    `length`, so that other depths move the passage only. The passage begins after the end of a sentence if there is one
    near, and the text is cut from the texts without it.

    depth: in percent of the text; None: the text does not contain the passage.

    Raises UserError if the prompt has no room for the passages, or if the texts are too short.
    """
    stream, ends = haystack.tokens, haystack.ends
    room = length - 1 - PASSAGE
    if room < 2 * PASSAGE:
        raise UserError(f"--lengths: {length} tokens leave no room for a text around a passage of {PASSAGE} tokens")
    if len(stream) < length:
        raise UserError(f"--lengths: {length} tokens are too many for the {len(stream):,} tokens of --texts")
    place = int(np.random.default_rng(sample).integers(len(stream) - 2 * PASSAGE + 1))
    stops = np.flatnonzero(ends[place : place + PASSAGE])
    place += int(stops[0]) + 1 if len(stops) else 0
    passage = stream[place : place + PASSAGE].tolist()
    first = int(np.random.default_rng((length, sample)).integers(len(stream) - PASSAGE - room + 1))
    index = np.arange(first, first + room)
    index += PASSAGE * (index >= place)
    if depth is None:
        return Prompt([haystack.tokenizer.bos_id, *stream[index].tolist(), *passage], None)
    index = index[PASSAGE:]
    most = len(index) * depth // 100
    stops = np.flatnonzero(ends[index[:most]])
    at = int(stops[-1]) + 1 if len(stops) else most
    head = [haystack.tokenizer.bos_id, *stream[index[:at]].tolist()]
    return Prompt([*head, *passage, *stream[index[at:]].tolist(), *passage], len(head))


@torch.no_grad()
def read(model: Decoder, prompts: Sequence[Sequence[int]]) -> tuple[np.ndarray, np.ndarray]:
    """Return the loss in nats, float32, and whether the most likely token is right, bool, of the measured tokens.

    prompts: of one length. Both results are [prompts, MEASURED].

    Raises UserError if a pass does not fit into the GPU's memory.
    """
    length, device = len(prompts[0]), model.groups.device
    at_once = max(1, PASS_TOKENS // length)
    found, right = [], []
    for first in range(0, len(prompts), at_once):
        tokens = torch.tensor(prompts[first : first + at_once], device=device)
        layout = PackedLayout.from_lengths([length] * len(tokens)).to(device)
        ends = torch.arange(1, len(tokens) + 1, device=device) * length
        rows = (ends[:, None] - 1 - torch.arange(MEASURED, 0, -1, device=device)).flatten()  # each predicts the next
        targets = tokens.flatten()[rows + 1]
        try:
            logits = model(tokens.flatten(), layout, rows=rows).float()
        except torch.OutOfMemoryError:
            raise UserError(
                f"--lengths: {tokens.numel():,} tokens in one pass do not fit into the GPU's memory"
            ) from None
        losses = torch.nn.functional.cross_entropy(logits, targets, reduction="none")
        found.append(losses.view(-1, MEASURED).cpu().numpy())
        right.append((logits.argmax(-1) == targets).view(-1, MEASURED).cpu().numpy())
    return np.concatenate(found), np.concatenate(right)


def evaluate(run: Path, changes: list[str], arguments: argparse.Namespace, cells: list[tuple[int, int | None]]) -> Path:
    """Evaluate one run in all cells, (length, depth). Returns the result file."""
    groups = initialize()
    with reading(run, groups, "RUN") as checkpoint:
        model, config = load_model(checkpoint, groups, changes=changes)
        tokenizer = TextTokenizer.of_checkpoint(checkpoint, None)
    file = results_file(checkpoint, changes)
    file = file.with_name(f"repeats-{file.name}")
    haystack = Haystack(read_documents(arguments.texts), tokenizer)
    settings: dict[str, Any] = {
        **described("repeats", checkpoint, changes, arguments.texts),
        "train_length": config.data.length,
        "samples": arguments.samples,
    }
    result = {"cells": []} | begun(file, settings)
    done = {(cell["length"], cell["depth"]) for cell in result["cells"]}
    for length, depth in cells:
        if (length, depth) in done:
            continue
        prompts = [draw_prompt(haystack, length, depth, sample) for sample in range(arguments.samples)]
        losses, right = read(model, [prompt.tokens for prompt in prompts])
        loss, share = float(losses.mean(dtype=np.float64)), float(right.mean())
        result["cells"].append({"length": length, "depth": depth, "loss": loss, "right": share})
        write(file, result)
        where = "without the passage" if depth is None else f"depth {depth} %"
        print(f"{result['run']} {length} tokens, {where}: {loss:.4f} nats, {share:.3f} right", flush=True)
    return file
