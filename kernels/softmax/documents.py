"""What attention takes besides its tensors: the bounds of the documents, and the options."""

from collections.abc import Iterator
from typing import NamedTuple

from torch import Tensor


class Documents(NamedTuple):
    """How T tokens are divided into documents, and how attention runs within each of them."""

    cu_seqlens: Tensor  # [num_documents + 1] int32, ascending from 0 to T; equal neighbours are empty documents
    max_seqlen: int  # an upper bound of the documents' lengths
    uniform_length: int | None  # the length of all documents, where they share one
    scale: float  # of the logits q·k
    window: int | None  # the most keys that a query sees, its own included; None: all up to its own
    deterministic: bool  # gradients must be the same bits in every run
    backend: str = "auto"  # `cudnn` or `flash` override the choice on a GPU (`backends.choose_backend`)
    partial: bool = False  # backward gets the o and lse over more keys than its k and v, because other ranks hold those


class Rectangles(NamedTuple):
    """Rectangles of the attention matrix without a mask: each query of one sees all keys of it.

    A rectangle (first, end, first_key, end_key) covers the tokens first to end − 1 of q and first_key to end_key − 1
    of k and v. It may be empty. No two share a query or a key. The number of rectangles and both upper bounds are the
    same for every batch of a run, so that one cuDNN plan serves all batches.
    """

    bounds: tuple[tuple[int, int, int, int], ...]
    max_queries: int  # an upper bound of the queries of a rectangle
    max_keys: int  # an upper bound of the keys of a rectangle

    def slices(self) -> Iterator[tuple[slice, slice]]:
        """The queries and the keys of each rectangle."""
        for first, end, first_key, end_key in self.bounds:
            yield slice(first, end), slice(first_key, end_key)

    def __bool__(self) -> bool:
        """Whether any rectangle has something to compute."""
        return any(first < end and first_key < end_key for first, end, first_key, end_key in self.bounds)
