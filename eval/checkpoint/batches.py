"""Which requests a forward pass takes together."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ssscale.model.decoder import Decoder

CPU_TOKENS, CPU_LOGITS = 16_384, 2**28
MAX_TOKENS = 131_072  # more would be no faster
MEMORY_SHARE = 8  # of a GPU's memory, one part for what a batch's tokens need and one for its logits
CACHE_SHARE = 4  # of its memory, for the keys and values of texts that are generated together


class Bounds(NamedTuple):
    """The most tokens and rows of logits of a pass, and the most cached tokens while texts are generated."""

    tokens: int
    rows: int
    cached: int


def batch_bounds(model: Decoder) -> Bounds:
    """The same on all ranks, which must call this together."""
    config, groups = model.config, model.groups
    tokens, rows, cached = CPU_TOKENS, CPU_LOGITS // config.vocab_size, CPU_TOKENS
    if groups.device.type == "cuda":
        memory = torch.cuda.get_device_properties(groups.device).total_memory
        size = next(model.parameters()).element_size()
        keys = size * 2 * config.num_layers * config.kv_heads * config.head_size // groups.tensor_size
        alive = size * (8 * config.hidden_size + 4 * config.ffn_hidden_size)
        tokens = min(MAX_TOKENS, memory // MEMORY_SHARE // (keys + alive))
        rows = memory // MEMORY_SHARE // ((size + 8) * config.vocab_size)  # logits, in float32, and their exponentials
        cached = memory // CACHE_SHARE // keys
    if model.sequence_parallel:  # the head gathers all tokens before rows are chosen
        tokens = min(tokens, rows)
    bounds = torch.tensor([tokens, rows, cached], device=groups.device)
    dist.all_reduce(bounds, dist.ReduceOp.MIN)
    return Bounds(*bounds.tolist())


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
