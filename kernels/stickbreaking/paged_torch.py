"""The CPU implementation over a paged cache: exact, vectorised over heads and sequences of similar lengths."""

import itertools
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from .torch_path import TILE_ELEMENTS


def _batches(queries: list[int], keys: list[int], num_heads: int) -> Iterator[list[int]]:
    """Yields the sequences that have new tokens, in batches.

    Those of a batch have equally many queries and similarly many keys: padding at most doubles the keys.
    """
    alike: dict[tuple[int, int], list[int]] = {}
    for i, (num_queries, num_keys) in enumerate(zip(queries, keys, strict=True)):
        if num_queries:
            alike.setdefault((num_queries, num_keys.bit_length()), []).append(i)
    for members in alike.values():
        num_queries, longest = queries[members[0]], max(keys[i] for i in members)
        step = max(1, TILE_ELEMENTS // max(1, num_heads * num_queries * longest))
        yield from (members[first : first + step] for first in range(0, len(members), step))


def _gather(cache: Tensor, blocks: Tensor, held: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns [B, K, 1, S, H]. held [B, S]: slots that hold a key; the others become zeros, whatever they contain."""
    x = cache[blocks].flatten(1, 2)[:, : held.shape[1]]
    return x.masked_fill(~held[..., None, None], 0).to(dtype).transpose(1, 2)[:, :, None]


def _attend(q: Tensor, k: Tensor, v: Tensor, position: Tensor, scale: float, remainder: bool) -> tuple[Tensor, Tensor]:
    """q [B, K, G, C, H]; k, v [B, K, 1, S, H]; position [B, C]. Returns o [B, K, G, C, H] and log_rest [B, K, G, C]."""
    num_keys = k.shape[3]
    key = torch.arange(num_keys)
    visible = (key < position[..., None])[:, None, None]
    z = (scale * (q @ k.transpose(-1, -2))).masked_fill(~visible, -torch.inf)
    # There is one more column than keys: the sum for the nearest key is 0, and the last column is log_rest.
    suffix = z.new_zeros(*z.shape[:-1], num_keys + 1)
    torch.cumsum(logsigmoid(-z).flip(-1), -1, out=suffix[..., 1:])
    weights = (logsigmoid(z) + suffix[..., :-1].flip(-1)).exp()
    log_rest = suffix[..., -1]
    if remainder:
        own = (key == position[..., None])[:, None, None]
        weights = torch.where(own, log_rest.exp()[..., None], weights)
    return weights @ v, log_rest


def forward(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    starts: list[int],
    seq_lens: list[int],
    scale: float,
    remainder: bool,
) -> tuple[Tensor, Tensor]:
    dtype = torch.promote_types(q.dtype, torch.float32)
    block_size, num_kv_heads = k_cache.shape[1:3]
    o, log_rest = torch.zeros(q.shape, dtype=q.dtype), torch.zeros(q.shape[:2], dtype=dtype)
    queries = [end - start for start, end in itertools.pairwise(starts)]
    for batch in _batches(queries, seq_lens, q.shape[1]):
        num_queries = queries[batch[0]]
        lengths = torch.tensor([seq_lens[i] for i in batch])
        longest = int(lengths.max())
        used = torch.arange(-(-longest // block_size)) * block_size < lengths[:, None]
        # The rest of the table may name blocks that do not exist.
        blocks = torch.where(used, block_table[batch, : used.shape[1]].long(), 0)
        held = torch.arange(longest) < lengths[:, None]
        k, v = (_gather(cache, blocks, held, dtype) for cache in (k_cache, v_cache))
        first = torch.tensor([starts[i] for i in batch])[:, None]
        chunk = max(1, TILE_ELEMENTS // max(1, len(batch) * q.shape[1] * longest))
        for row in range(0, num_queries, chunk):
            rows = torch.arange(row, min(row + chunk, num_queries))
            # [B, C, K, G, H] → [B, K, G, C, H]
            q_t = q[first + rows].unflatten(2, (num_kv_heads, -1)).permute(0, 2, 3, 1, 4).to(dtype)
            position = (lengths - num_queries)[:, None] + rows
            seen = min(longest, int(position.max()) + 1)
            out, rest = _attend(q_t, k[:, :, :, :seen], v[:, :, :, :seen], position, scale, remainder)
            o[first + rows] = out.permute(0, 3, 1, 2, 4).flatten(2, 3).to(q.dtype)
            log_rest[first + rows] = rest.permute(0, 3, 1, 2).flatten(2, 3)
    return o, log_rest
