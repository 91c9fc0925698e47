"""KV cache for generation."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from ssscale_kernels.upload import upload
from torch import Tensor

from ssscale.layout import CachedKeys, PackedLayout
from ssscale.model.decoder import Decoder


class LayerCache(NamedTuple):
    """The view that one layer has of the cache during one pass.

    k, v: [B · capacity, K, H]. rows: [T] int64, the index in k and v at which each token of this pass is stored.
    """

    k: Tensor
    v: Tensor
    rows: Tensor
    first: bool  # True if no sequence has earlier tokens

    def extend(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Stores k and v [T, K, H] of this pass. Returns the whole cache, or k and v themselves in the first pass."""
        self.k.index_copy_(0, self.rows, k)
        self.v.index_copy_(0, self.rows, v)
        return (k, v) if self.first else (self.k, self.v)


def _sizes(model: Decoder) -> tuple[int, int, int]:
    """Returns the layers, heads of this rank and dimensions of a token's keys."""
    config = model.config
    return config.num_layers, config.kv_heads // model.groups.tensor_size, config.head_size


def bytes_per_token(model: Decoder) -> int:
    """Returns the bytes that the keys and values of a token take in the cache of this rank, over all layers."""
    return 2 * math.prod(_sizes(model)) * next(model.parameters()).dtype.itemsize


class KVCache:
    """The keys and values of B sequences, [layers, B, capacity, K, H] for the heads of this rank.

    final_lengths: the maximum number of tokens of each sequence. To run a pass, call `layout = cache.begin(counts)` and
    then `model(tokens, layout, cache=cache)`, where `tokens` holds counts[b] further tokens of every sequence b,
    concatenated. A prompt can be processed in one pass, in chunks or token by token.

    Under sequence parallelism, the number of tokens in a pass must be divisible by the number of ranks. One additional
    sequence, which never grows, holds the padding.

    Raises UserError for a mixer that cannot read cached keys.
    """

    def __init__(self, model: Decoder, final_lengths: Sequence[int]) -> None:
        config, self.tensor_size = model.config, model.groups.tensor_size
        weight = next(model.parameters())
        self.filled = model.sequence_parallel
        self.mixers, self.window = list(config.used.values()), config.position.window
        for mixer in self.mixers:
            if not mixer.cached:
                raise mixer.lacks("cached", "it cannot read keys of earlier passes: no text can be generated")
        self.final_lengths = list(final_lengths)
        self.lengths = [0] * len(self.final_lengths)
        self.capacity = max(*self.final_lengths, self.tensor_size)
        slots = len(self.lengths) + self.filled
        layers, heads, size = _sizes(model)
        shape = layers, slots, self.capacity, heads, size
        self.k, self.v = (torch.zeros(shape, dtype=weight.dtype, device=weight.device) for _ in range(2))
        self._rows = torch.empty(0, dtype=torch.int64)
        self._first = True

    def begin(self, counts: Sequence[int]) -> PackedLayout:
        """Returns the layout for counts[b] further tokens of each sequence b. From then on they count as cached.

        Raises ValueError if `counts` does not fit the cached sequences or if a sequence would outgrow its slot.
        """
        if len(counts) != len(self.lengths) or min(counts) < 0 or not any(counts):
            raise ValueError(f"{len(self.lengths)} sequences are cached; got counts of further tokens {list(counts)}")
        before, after = self.lengths, [n + count for n, count in zip(self.lengths, counts, strict=True)]
        for length, final in zip(after, self.final_lengths, strict=True):
            if length > final:
                raise ValueError(f"a sequence of {length} tokens does not fit its {final} of the cache")
        counts, final_lengths = list(counts), self.final_lengths
        if self.filled:
            before, counts = [*before, 0], [*counts, -sum(counts) % self.tensor_size]
            final_lengths = [*final_lengths, self.tensor_size]
        device = self.k.device
        sizes, offsets = torch.tensor(counts, dtype=torch.int32), torch.tensor(before, dtype=torch.int32)
        cu_seqlens = torch.nn.functional.pad(sizes.cumsum(0, dtype=torch.int32), (1, 0))
        within = torch.arange(sum(counts), dtype=torch.int32) - cu_seqlens[:-1].repeat_interleave(sizes)
        positions = within + offsets.repeat_interleave(sizes)
        slots = torch.arange(len(counts)).repeat_interleave(sizes)
        self._rows = upload(slots * self.capacity + positions, device)
        self._first = not any(before)
        past = None
        if not self._first:
            bounds = torch.arange(len(counts) + 1, dtype=torch.int32) * self.capacity
            longest = max(n + count for n, count in zip(before, counts, strict=True))
            starts = cu_seqlens.tolist()
            bounds, offsets = upload(bounds, device), upload(offsets, device)
            given = starts, list(before), self._rows, self.capacity, self.window
            plans = {mixer.name: mixer.plan_decode(*given) for mixer in self.mixers}
            past = CachedKeys(self.capacity, bounds, offsets, self._rows, list(before), starts, longest, plans)
        self.lengths = after
        uniform = counts[0] if self._first and len(set(counts)) == 1 else None
        final = upload(torch.tensor(final_lengths, dtype=torch.int32), device)
        cu_seqlens, positions = upload(cu_seqlens, device), upload(positions, device)
        return PackedLayout(cu_seqlens, positions, max(counts), uniform, past, final)

    def layers(self) -> list[LayerCache]:
        """Returns the view of each layer for the pass that `begin` laid out."""
        parts = zip(self.k.flatten(1, 2), self.v.flatten(1, 2), strict=True)
        return [LayerCache(k, v, self._rows, self._first) for k, v in parts]

    def share(self, sources: Sequence[int]) -> None:
        """Copies the tokens of sequence sources[b] to each sequence b. A sequence with sources[b] = b keeps its own.

        Sequences that receive tokens must be empty.
        """
        assert all(source == b or self.lengths[b] == 0 for b, source in enumerate(sources)), self.lengths
        longest = max(self.lengths)
        slots = upload(torch.tensor([*sources, *([len(self.lengths)] if self.filled else [])]), self.k.device)
        for x in (self.k, self.v):
            x[:, :, :longest] = x[:, slots, :longest]
        self.lengths = [self.lengths[source] for source in sources]

    def keep(self, sequences: Sequence[int]) -> None:
        """Drops all other sequences. The ones that remain are renumbered in the given order."""
        slots = [*sequences, *([len(self.lengths)] if self.filled else [])]
        chosen = upload(torch.tensor(slots, dtype=torch.int64), self.k.device)
        self.k, self.v = self.k[:, chosen], self.v[:, chosen]
        self.lengths = [self.lengths[b] for b in sequences]
        self.final_lengths = [self.final_lengths[b] for b in sequences]
