"""Where the documents of packed tokens begin and end."""

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

# Label of a token without a target, torch's default: the last token of a document or of its piece in a row, padding,
# and the tokens before the answer in fine-tuning.
IGNORE = -100


@dataclass(frozen=True)
class CachedKeys:
    """Where the keys of B sequences lie in a KV cache, including the keys of the current pass.

    Each sequence has a slot that holds `capacity` tokens. Its keys fill the slot from the start.

    cu_seqlens: [B + 1] int32, the boundaries of the slots, in tokens of the cache.
    offsets: [B] int32, the number of tokens that each sequence had before this pass. lengths: the same on the host.
    rows: [T] int64, the index in the cache at which each token of this pass is stored.
    starts: the layout's cu_seqlens on the host.
    max_seqlen: length of the longest sequence, including this pass.
    decode: what `Mixer.plan_decode` returned, by the mixer's name, for all of its layers.
    """

    capacity: int
    cu_seqlens: Tensor
    offsets: Tensor
    rows: Tensor
    lengths: list[int]
    starts: list[int]
    max_seqlen: int
    decode: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class RingChunks:
    """Which documents cross the chunks of a ring. A ring of R ranks divides each row into 2R chunks.

    Rank r of the ring holds chunks r and 2R − 1 − r of every row. `heads` and `begins` cover all chunks of all rows, not
    only those of this rank, because the ranks must agree on which keys each of them needs.

    size: tokens per chunk.
    heads[row][i]: number of tokens at the start of chunk i whose document begins in an earlier chunk.
    begins[row][i]: token of the row at which the document of chunk i's first token begins.
    """

    size: int
    heads: tuple[tuple[int, ...], ...]
    begins: tuple[tuple[int, ...], ...]

    def num_far_keys(self, row: int, query_chunk: int, key_chunk: int) -> int:
        """Returns how many keys of an earlier chunk the first heads[row][query_chunk] queries of a chunk attend to.

        These are the last keys of that chunk, and all of these queries attend to the same ones.
        """
        if not self.heads[row][query_chunk]:
            return 0
        return max(0, (key_chunk + 1) * self.size - max(self.begins[row][query_chunk], key_chunk * self.size))


@dataclass(frozen=True)
class Gathered:
    """The tokens of a whole Ulysses group, which each of its ranks sees in attention (arXiv:2309.14509).

    They belong to `rows` rows, and each rank of the group contributes the same number of tokens of every row.
    layout: the documents of all these tokens.
    """

    rows: int
    layout: "PackedLayout"


@dataclass(frozen=True)
class PackedLayout:
    """The documents of T packed tokens. Document d is tokens cu_seqlens[d] to cu_seqlens[d + 1] − 1.

    cu_seqlens: [num_documents + 1] int32, ascending from 0 to T. Equal neighbours are empty documents, used as padding.
    positions: [T] int32, the position of each token within its document. Cached tokens count.
    max_seqlen: an upper bound on the length of a document, the same for every batch of a run so that shapes stay static.
    uniform_length: the length of all documents if they have the same length, which allows dense kernels; else None.
    past: where the keys lie if earlier passes cached some of them. None: the keys are those of the T tokens.
    final_lengths: [num_documents] int32, the whole length of each document, which a cached one will reach later. None: the
        documents are complete.
    block_mask: FlexAttention's mask of these documents, made once per batch for the position methods that need it.

    Under context parallelism the T tokens are this rank's share of the rows. cu_seqlens then bounds the contiguous pieces
    of documents in this share, final_lengths has the length of the document that a piece belongs to, and positions still
    count within the whole document.

    gathered: the tokens that attention sees under Ulysses. ring: where the other keys of these documents lie in a ring.
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
        """Returns the layout of consecutive documents of the given lengths, with CPU tensors.

        max_seqlen: raised to the longest length if it is smaller. Raises ValueError if a length is below 1 or none is given.
        """
        if not lengths or min(lengths) < 1:
            raise ValueError(f"document lengths must be at least 1, got {lengths}")
        sizes = torch.tensor(lengths, dtype=torch.int32)
        cu_seqlens = torch.nn.functional.pad(sizes.cumsum(0, dtype=torch.int32), (1, 0))
        positions = torch.arange(int(sizes.sum()), dtype=torch.int32) - cu_seqlens[:-1].repeat_interleave(sizes)
        uniform = lengths[0] if len(set(lengths)) == 1 else None
        return cls(cu_seqlens, positions, max(max_seqlen or 0, max(lengths)), uniform)

    def num_visible_keys(self, window: int | None = None) -> Tensor:
        """Returns how many keys each query attends to under a causal mask, [T] int32.

        The query's own key and cached keys count. The number is at most `window`.
        """
        n = self.positions + 1
        return n if window is None else n.clamp(max=window)

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Self:
        """Returns the same documents with their tensors on another device. `past` and `block_mask` must be None."""
        assert self.past is None
        assert self.block_mask is None
        cu_seqlens = self.cu_seqlens.to(device, non_blocking=non_blocking)
        positions = self.positions.to(device, non_blocking=non_blocking)
        final = self.final_lengths
        if final is not None:
            final = final.to(device, non_blocking=non_blocking)
        gathered = self.gathered
        if gathered is not None:
            gathered = replace(gathered, layout=gathered.layout.to(device, non_blocking))
        return replace(self, cu_seqlens=cu_seqlens, positions=positions, final_lengths=final, gathered=gathered)
