"""How a packed row of tokens is divided into documents."""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Self

import torch
from torch import Tensor

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask


@dataclass(frozen=True)
class CachedKeys:
    """The keys of B sequences in a cache, this pass's included: those of sequence b begin slot b of `capacity` rows each.

    cu_seqlens: [B + 1] int32, the slots' bounds. offsets: [B] int32 and, on the host, `lengths`: tokens before this pass.
    rows: [T] int64, the cache's row of each token of this pass. starts: the layout's cu_seqlens on the host.
    max_seqlen: the longest sequence, this pass included.
    """

    capacity: int
    cu_seqlens: Tensor
    offsets: Tensor
    rows: Tensor
    lengths: list[int]
    starts: list[int]
    max_seqlen: int


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
    """

    cu_seqlens: Tensor
    positions: Tensor
    max_seqlen: int
    uniform_length: int | None = None
    past: CachedKeys | None = None
    final_lengths: Tensor | None = None
    block_mask: "BlockMask | None" = None

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
        return replace(self, cu_seqlens=cu_seqlens, positions=self.positions.to(device, non_blocking=non_blocking))
