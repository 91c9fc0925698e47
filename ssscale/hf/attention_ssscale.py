"""What a batch is to attention, and the functions that mixers share. This file needs only torch and transformers.

q: [B, N, T, H]; k, v: [B, K, S, H], S: cached and new tokens. layer: the attention layer, of layers_ssscale.py.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.cache_utils import Cache
from transformers.utils import logging

logger = logging.get_logger(__name__)
TILE_ELEMENTS = 1 << 24  # elements of temporaries per block of queries, if no fused kernel applies


@dataclass
class Batch:
    """What all layers share in a forward pass.

    i: [B, T] and j: [B, S] positions of queries and keys in their documents. columns: [T] places of the queries among
    the keys. past: number of cached tokens. real: [B, S] False for padding, or None. document: [B, S] number of each
    token's document, or None if a row is one document. rotation: cos and sin of the queries, or None. own: what the
    layers of each mixer share, by its name.
    """

    i: Tensor
    j: Tensor
    columns: Tensor
    past: int | Tensor
    real: Tensor | None = None
    document: Tensor | None = None
    rotation: tuple[Tensor, Tensor] | None = None
    own: dict[str, Any] = field(default_factory=dict)

    def visible(self, first: int, last: int, window: int | None, strict: bool) -> Tensor:
        """Returns the mask [B, last − first, S] of keys that these queries attend to; only earlier keys if `strict`."""
        distance = self.i[:, first:last, None] - self.j[:, None, :]
        seen = distance > 0 if strict else distance >= 0
        if window is not None:
            seen = seen & (distance < window)
        if self.document is not None:
            seen = seen & (self.document[:, self.columns[first:last], None] == self.document[:, None, :])
        if self.real is None:
            return seen
        seen = seen & self.real[:, None, :]
        if strict:
            return seen
        # Padding attends to itself, or it would be NaN and its cached values would reach other tokens as 0 · NaN.
        return seen | (self.columns[first:last, None] == torch.arange(self.j.shape[1], device=self.j.device))


def make_batch(
    tokens: torch.Size,
    device: torch.device,
    attention_mask: Tensor | None,
    position_ids: Tensor | None,
    cache: Cache | None,
    cache_position: Tensor | None,
) -> Batch:
    """Returns the batch of B · T new tokens, without rotation and without what mixers share.

    The arguments are those of `SSScaleModel.forward`. Raises ValueError if attention_mask has another shape.
    """
    rows, new = tokens
    # A compiled pass over a static cache has a tensor as its start, and reads all columns of the cache.
    static = cache.layers[0].max_cache_len if cache is not None and is_static(cache) else None
    compiled = torch.compiler.is_compiling()
    past = cache.get_seq_length() if cache is not None else 0
    if static is not None and cache_position is not None:
        past = cache_position[0]
    if static is None or not compiled:
        past = int(past)
    columns = past + torch.arange(new, device=device)
    size = static if static is not None and compiled else past + new
    row = torch.arange(size, device=device)[None]
    real = _real_tokens(attention_mask, (rows, past + new, size), static)
    if static is not None and compiled:
        real = (row <= columns[-1]) if real is None else real & (row <= columns[-1])
    if real is not None:
        j = (real.long().cumsum(-1) - 1).clamp(min=0)
        return Batch(j[:, columns], j, columns, past, real)
    if position_ids is not None and attention_mask is None and cache is None:
        starts = position_ids.diff(prepend=position_ids[:, :1] - 1) != 1
        if compiled or starts.any():
            j = row - torch.where(starts, row, 0).cummax(-1).values
            return Batch(j, j, columns, past, document=starts.cumsum(-1))
    return Batch(row[:, past:], row, columns, past)


def is_static(cache: Cache) -> bool:
    """Returns whether the cache has all its columns from the start."""
    return bool(cache.layers) and hasattr(cache.layers[0], "max_cache_len")


def _real_tokens(mask: Tensor | None, sizes: tuple[int, int, int], static: int | None) -> Tensor | None:
    """Returns [B, S] False for padding, or None if there is none. sizes: B; cached and new tokens; S."""
    rows, total, size = sizes
    if mask is None:
        return None
    compiled = torch.compiler.is_compiling()
    if mask.ndim != 2 or mask.shape[0] != rows or (not compiled and mask.shape[1] not in (total, static)):
        raise ValueError(f"attention_mask must be [{rows}, {total}], 0 for padding, not {tuple(mask.shape)}")
    mask = F.pad(mask[:, :size], (0, max(0, size - mask.shape[1])))
    return mask.bool() if compiled or not mask.all() else None


def fused(q: Tensor, k: Tensor, v: Tensor, batch: Batch, layer: Any) -> Tensor | None:
    """Computes softmax attention in torch's kernel. Returns None if its causal mask does not fit the batch."""
    k, v = grouped(q, k, v)
    if batch.real is not None or batch.document is not None or not (layer.window is None or k.shape[2] <= layer.window):
        return None
    if q.shape[2] == 1:
        return F.scaled_dot_product_attention(q, k, v, scale=layer.scale)
    if q.shape[2] == k.shape[2]:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=layer.scale)
    return None


def grouped(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Repeats the heads of k and v to match q."""
    repeats = q.shape[1] // k.shape[1]
    return k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)


@functools.cache
def gpu_function(module: str, name: str, device: torch.device) -> Callable[..., Any] | None:
    """Returns a function of an optional package with kernels for GPUs, or None if it cannot run on this device.

    The kernels were measured on Hopper GPUs only. On a GPU, what runs is logged once.
    """
    if device.type != "cuda":
        return None
    package = module.split(".")[0].replace("_", "-")
    try:
        found = getattr(importlib.import_module(module), name)
    except ImportError:
        logger.warning("%s runs in plain torch on %s; the package %s would be faster", name, device, package)
        return None
    if torch.version.cuda is None or torch.cuda.get_device_capability(device)[0] != 9:
        logger.warning("%s runs in plain torch on %s; the kernels of %s are for Hopper GPUs", name, device, package)
        return None
    logger.warning("%s runs on the kernels of %s on %s", name, package, device)
    return found


def packed(x: Tensor, kept: Tensor | None) -> Tensor:
    """Returns the tokens of x [B, heads, T, H] that are `kept` [B, T], row by row: [tokens, heads, H]."""
    x = x.transpose(1, 2)
    return x.flatten(0, 1) if kept is None else x[kept]


def boundaries(batch: Batch, rows: int, queries: int, keys: int) -> tuple[Tensor, Tensor, Tensor]:
    """Returns where packed sequences begin, [sequences + 1] int32, for queries and keys, and their first positions.

    The last `queries` of the `keys` tokens of a row are queries. A sequence is a row without its padding, or a document.
    """
    if batch.document is not None:
        document = batch.document.expand(rows, -1)
        first = document.diff(prepend=document[:, :1] - 1) != 0
        starts = F.pad(first.flatten().nonzero()[:, 0], (0, 1), value=first.numel()).int()
        return starts, starts, torch.zeros_like(starts[1:])
    if batch.real is None:
        steps = torch.arange(rows + 1, dtype=torch.int32, device=batch.j.device)
        return steps * queries, steps * keys, torch.full_like(steps[1:], keys - queries)
    counts = torch.stack([batch.real[:, keys - queries :].sum(-1), batch.real.sum(-1)])
    starts_q, starts_k = F.pad(counts.cumsum(-1), (1, 0)).int()
    return starts_q, starts_k, (counts[1] - counts[0]).int()


def attend_in_tiles(
    run: Callable[..., Tensor],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    batch: Batch,
    layer: Any,
    strict: bool = False,
    inner: int = 1,
) -> Tensor:
    """Calls run(q, k, v, visible, batch, layer, first) for blocks of queries, so that no [T, S] matrix is held whole.

    first: index of the first query of the block. visible: mask of the keys that each query attends to; only earlier
    ones if `strict`. inner: numbers that `run` holds per pair.
    """
    k, v = grouped(q, k, v)
    rows = max(1, TILE_ELEMENTS // (q.shape[0] * q.shape[1] * k.shape[2] * inner))
    parts = []
    for first in range(0, q.shape[2], rows):
        part = q[:, :, first : first + rows]
        visible = batch.visible(first, first + part.shape[2], layer.window, strict)[:, None]
        parts.append(run(part, k, v, visible, batch, layer, first))
    return torch.cat(parts, 2)


def biased(q: Tensor, k: Tensor, v: Tensor, visible: Tensor, batch: Batch, layer: Any, first: int) -> Tensor:
    """softmax(scale · q·k + bias) v, computed in float32."""
    i = batch.i[:, first : first + q.shape[2]]
    z = q.float() @ k.float().transpose(-1, -2) * layer.scale
    z = z + layer.bias(i, batch.j)
    return (z.masked_fill(~visible, -torch.inf).softmax(-1) @ v.float()).to(q.dtype)


@dataclass
class Part:
    """The functions of one mixer: mixing, the factor of q, and what all its layers share (see `Export`)."""

    mix: Callable[..., Tensor]
    factor: Callable[..., Tensor] | None = None
    prepare: Callable[..., Tensor] | None = None
