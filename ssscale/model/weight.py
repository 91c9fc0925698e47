"""The learned tensors that a mixer or a position method declares; needs no torch."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Weight:
    """A learned tensor, by its shape in the whole model. Counting, building, initialising and exporting it follow from this.

    start: the value of every element at the start of training; bound: they are drawn from U(−bound, bound) instead.
    split: the dimension that tensor parallelism splits over its ranks, the one of the heads; None: each rank has all of it.
    """

    shape: tuple[int, ...]
    start: float = 0.0
    bound: float | None = None
    split: int | None = None
