"""Packs requests into forward passes within limits on tokens, rows of logits and cache."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ssscale.model.decoder import Decoder

CPU_TOKENS, CPU_LOGITS = 16_384, 2**28
MAX_TOKENS = 131_072  # larger batches are not faster
MEMORY_SHARE = 8  # 1/8 of the GPU memory for activations and keys of the tokens, and 1/8 for logits
CACHE_SHARE = 4  # 1/4 of the GPU memory for the KV cache during generation


class Bounds(NamedTuple):
    """Upper limits of one batch.

    tokens: tokens per forward pass.
    rows: rows of logits per forward pass.
    cached: tokens in the KV cache during generation.
    """

    tokens: int
    rows: int
    cached: int


def batch_bounds(model: Decoder) -> Bounds:
    """Return the limits for a model, from the memory of its GPU. On a CPU, memory is not considered.

    A collective call: every rank must make it. All ranks get the minimum over the ranks.
    """
    config, groups = model.config, model.groups
    tokens, rows, cached = CPU_TOKENS, CPU_LOGITS // config.vocab_size, CPU_TOKENS
    if groups.device.type == "cuda":
        memory = torch.cuda.get_device_properties(groups.device).total_memory
        size = next(model.parameters()).element_size()
        keys = size * 2 * config.num_layers * config.kv_heads * config.head_size // groups.tensor_size
        alive = size * (8 * config.hidden_size + 4 * config.ffn_hidden_size)
        tokens = min(MAX_TOKENS, memory // MEMORY_SHARE // (keys + alive))
        rows = memory // MEMORY_SHARE // ((size + 8) * config.vocab_size)  # logits, also in float32, and exponentials
        cached = memory // CACHE_SHARE // keys
    if model.sequence_parallel:  # the head gathers all tokens before it selects rows
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
    """Yield batches of document indices, the longest documents first.

    A batch has at most max_tokens tokens. A document that is longer than max_tokens is a batch of its own.

    lengths: tokens per document.
    rows: rows of logits per document. A batch has at most max_rows of them.
    slots: slots of the KV cache per document. Each slot is as long as the longest document of the batch. With slots,
    max_tokens limits the cached tokens: slots times the longest length.

    Long documents come first for two reasons. A batch that does not fit into memory fails at once. Documents of one
    batch have similar lengths.
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
    """Group requests by generation settings. Returns (settings, indices of the requests) per group."""
    groups: list[tuple[dict[str, Any], list[int]]] = []
    for index, options in enumerate(settings):
        for known, members in groups:
            if known == options:
                members.append(index)
                break
        else:
            groups.append((options, [index]))
    return groups
