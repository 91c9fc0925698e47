"""The declaration of a mixer's or a position method's learned tensors. Does not need torch."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Weight:
    """A learned tensor. Parameter counts, building, initialisation and export follow from its declaration.

    shape: in the whole model. start: the value of every element at the start of training. bound: if given, the elements
    are drawn from U(−bound, bound) instead. split: the dimension that tensor parallelism splits, which is the one of
    the heads; None: every rank holds the whole tensor.
    """

    shape: tuple[int, ...]
    start: float = 0.0
    bound: float | None = None
    split: int | None = None
