"""What attention is told besides its tensors."""

from collections.abc import Iterator
from typing import NamedTuple

from torch import Tensor


class Documents(NamedTuple):
    """How T tokens are divided, and what attention does within each part.

    cu_seqlens [num_documents + 1] int32, ascending from 0 to T; equal neighbours are empty documents. max_seqlen: an upper
    bound of their lengths; uniform_length: their length where all have one. window: keys a query sees, itself
    included; None: all before it. deterministic: gradients must be the same bits in every run.
    backend: `auto`, or `cudnn` or `flash` on a GPU whatever the shapes (`backends.choose_backend`).
    partial: backward's o and lse are of more keys than the k and v that it gets (other ranks have those).
    """

    cu_seqlens: Tensor
    max_seqlen: int
    uniform_length: int | None
    scale: float
    window: int | None
    deterministic: bool
    backend: str = "auto"
    partial: bool = False


class Rectangles(NamedTuple):
    """Queries that see all of some keys: tokens first to end of q those from first_key to end_key of k and v, for each part
    (first, end, first_key, end_key).

    A part may be empty; no two share a query or a key. max_queries, max_keys: upper bounds of a part's. The number of parts
    and the bounds are the same for every batch of a run, so that one cuDNN plan does for all of them.
    """

    parts: tuple[tuple[int, int, int, int], ...]
    max_queries: int
    max_keys: int

    def slices(self) -> Iterator[tuple[slice, slice]]:
        """The queries and the keys of each part."""
        for first, end, first_key, end_key in self.parts:
            yield slice(first, end), slice(first_key, end_key)

    def __bool__(self) -> bool:
        """Whether any part has something to compute."""
        return any(first < end and first_key < end_key for first, end, first_key, end_key in self.parts)
