"""How a packed row of tokens is divided into documents."""

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor


@dataclass(frozen=True)
class PackedLayout:
    """The documents of T packed tokens: document d is tokens cu_seqlens[d] to cu_seqlens[d + 1].

    cu_seqlens: [num_documents + 1] int32, from 0 to T, ascending; equal neighbours (empty documents) are padding.
    positions: [T] int32, the position of each token within its document.
    max_seqlen: an upper bound on the documents' lengths, the same for every batch of a run so that shapes stay static.
    uniform_length: the length of every document where all have the same, else None; dense kernels apply then.
    """

    cu_seqlens: Tensor
    positions: Tensor
    max_seqlen: int
    uniform_length: int | None = None

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
        """The same layout with its tensors on another device."""
        return type(self)(
            self.cu_seqlens.to(device, non_blocking=non_blocking),
            self.positions.to(device, non_blocking=non_blocking),
            self.max_seqlen,
            self.uniform_length,
        )
