"""Which requests a forward pass takes together."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from ssscale.model.decoder import Decoder

CPU_TOKENS, CPU_LOGITS = 16_384, 2**28
MAX_TOKENS = 131_072  # more would be no faster
MEMORY_SHARE = 8  # of a GPU's memory, one part for what a batch's tokens need and one for its logits


def batch_bounds(model: Decoder) -> tuple[int, int]:
    """The most tokens and the most rows of logits of a pass, the same on all ranks (which must call this together)."""
    config, groups = model.config, model.groups
    tokens, rows = CPU_TOKENS, CPU_LOGITS // config.vocab_size
    if groups.device.type == "cuda":
        memory = torch.cuda.get_device_properties(groups.device).total_memory // MEMORY_SHARE
        size = next(model.parameters()).element_size()
        cached = 2 * config.num_layers * config.kv_heads * config.head_size // groups.tensor_size
        alive = 8 * config.hidden_size + 4 * config.ffn_hidden_size
        tokens = min(MAX_TOKENS, memory // (size * (cached + alive)))
        rows = memory // ((size + 8) * config.vocab_size)  # logits, in float32, and their exponentials
    if model.sequence_parallel:  # the head gathers all tokens before rows are chosen
        tokens = min(tokens, rows)
    bounds = torch.tensor([tokens, rows], device=groups.device)
    dist.all_reduce(bounds, dist.ReduceOp.MIN)
    tokens, rows = bounds.tolist()
    return tokens, rows


def pack(
    lengths: Sequence[int],
    max_tokens: int,
    rows: Sequence[int] | None = None,
    max_rows: int = 0,
    slots: Sequence[int] | None = None,
) -> Iterator[list[int]]:
    """Numbers of documents by batches of at most max_tokens tokens (or one document), the longest documents first.

    rows: of logits that each document needs, at most max_rows a batch. slots: sequences of a key/value cache that each
    takes; every one of them has the room of the batch's longest.

    The longest first: what does not fit into memory fails at once, and neighbours take equally long.
    """
    batch: list[int] = []
    tokens = used = taken = 0
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        needed = 0 if rows is None else rows[index]
        if slots is None:
            grown = tokens + lengths[index]
        else:
            grown = (taken + slots[index]) * lengths[batch[0] if batch else index]
        if batch and (grown > max_tokens or (rows is not None and used + needed > max_rows)):
            yield batch
            batch, used, taken = [], 0, 0
            grown = lengths[index] * (1 if slots is None else slots[index])
        batch.append(index)
        tokens, used = grown, used + needed
        taken += 0 if slots is None else slots[index]
    if batch:
        yield batch


def alike(settings: list[dict[str, Any]]) -> list[tuple[dict[str, Any], list[int]]]:
    """Requests by their generation settings."""
    groups: list[tuple[dict[str, Any], list[int]]] = []
    for index, options in enumerate(settings):
        for known, members in groups:
            if known == options:
                members.append(index)
                break
        else:
            groups.append((options, [index]))
    return groups
