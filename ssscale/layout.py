"""How a packed row of tokens is divided into documents."""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Self

import torch
from ssscale_kernels.cached import DecodePlan
from torch import Tensor

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask


@dataclass(frozen=True)
class CachedKeys:
    """The keys of B sequences in a cache, this pass's included: those of sequence b begin slot b of `capacity` rows each.

    cu_seqlens: [B + 1] int32, the slots' bounds. offsets: [B] int32 and, on the host, `lengths`: tokens before this pass.
    rows: [T] int64, the cache's row of each token of this pass. starts: the layout's cu_seqlens on the host.
    max_seqlen: the longest sequence, this pass included. decode: what softmax attention of few tokens needs in every layer.
    """

    capacity: int
    cu_seqlens: Tensor
    offsets: Tensor
    rows: Tensor
    lengths: list[int]
    starts: list[int]
    max_seqlen: int
    decode: DecodePlan | None = None


@dataclass(frozen=True)
class RingChunks:
    """How the documents of each row lie over the 2R chunks into which a ring of R ranks divides it.

    size: tokens of a chunk. Rank r of the ring has chunks r and 2R − 1 − r of every row. heads[row][i]: tokens at the start
    of chunk i whose document begins in an earlier chunk. begins[row][i]: where the document of chunk i's first token begins,
    in tokens of the row. Of all rows and chunks, not of this rank's: the ranks must agree on who needs what.
    """

    size: int
    heads: tuple[tuple[int, ...], ...]
    begins: tuple[tuple[int, ...], ...]

    def num_far_keys(self, row: int, query_chunk: int, key_chunk: int) -> int:
        """How many keys, the last ones of an earlier chunk, the first heads[row][query_chunk] queries of a chunk see."""
        if not self.heads[row][query_chunk]:
            return 0
        return max(0, (key_chunk + 1) * self.size - max(self.begins[row][query_chunk], key_chunk * self.size))


@dataclass(frozen=True)
class Gathered:
    """The tokens that attention sees when ranks exchange tokens for heads: of `rows` rows, an equal part from each rank."""

    rows: int
    layout: "PackedLayout"


@dataclass(frozen=True)
class PackedLayout:
    """The documents of T packed tokens: document d is tokens cu_seqlens[d] to cu_seqlens[d + 1].

    cu_seqlens: [num_documents + 1] int32, from 0 to T, ascending; equal neighbours (empty documents) are padding.
    positions: [T] int32, the position of each token within its document, cached tokens counted.
    max_seqlen: an upper bound on the documents' lengths, the same for every batch of a run so that shapes stay static.
    uniform_length: the length of every document where all have the same, else None; dense kernels apply then.
    past: where the keys lie when some of them were cached by earlier passes; None: queries and keys are the same tokens.
    final_lengths: [num_documents] int32, the lengths that documents in a cache are to reach; None: these are whole.
    block_mask: FlexAttention's mask of these documents, made once a batch for the position methods that need it.

    Under context parallelism the tokens are a rank's share of the rows: cu_seqlens bounds the parts of documents that lie
    together in it, while positions still count within the whole document.
    gathered: what attention sees under Ulysses. ring: where further keys of these documents lie, under a ring.
    """

    cu_seqlens: Tensor
    positions: Tensor
    max_seqlen: int
    uniform_length: int | None = None
    past: CachedKeys | None = None
    final_lengths: Tensor | None = None
    block_mask: "BlockMask | None" = None
    gathered: Gathered | None = None
    ring: RingChunks | None = None

    @classmethod
    def from_lengths(cls, lengths: list[int], max_seqlen: int | None = None) -> Self:
        """Documents of the given lengths, one behind the other. Raises ValueError for a length below one."""
        if not lengths or min(lengths) < 1:
            raise ValueError(f"document lengths must be at least 1, got {lengths}")
        sizes = torch.tensor(lengths, dtype=torch.int32)
        cu_seqlens = torch.nn.functional.pad(sizes.cumsum(0, dtype=torch.int32), (1, 0))
        positions = torch.arange(int(sizes.sum()), dtype=torch.int32) - cu_seqlens[:-1].repeat_interleave(sizes)
        uniform = lengths[0] if len(set(lengths)) == 1 else None
        return cls(cu_seqlens, positions, max(max_seqlen or 0, max(lengths)), uniform)

    def num_visible_keys(self, window: int | None = None) -> Tensor:
        """[T] int32: how many keys each query sees under a causal mask, itself and cached ones included, at most `window`."""
        n = self.positions + 1
        return n if window is None else n.clamp(max=window)

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Self:
        """The same documents with their tensors on another device."""
        assert self.past is None
        assert self.block_mask is None
        cu_seqlens = self.cu_seqlens.to(device, non_blocking=non_blocking)
        positions = self.positions.to(device, non_blocking=non_blocking)
        gathered = self.gathered
        if gathered is not None:
            gathered = replace(gathered, layout=gathered.layout.to(device, non_blocking))
        return replace(self, cu_seqlens=cu_seqlens, positions=positions, gathered=gathered)
