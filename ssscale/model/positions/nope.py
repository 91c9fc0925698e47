"""No positions."""

from dataclasses import dataclass

from ssscale.config.registry import POSITIONS
from ssscale.model.positions.base import Position


@POSITIONS.register("nope")
@dataclass(frozen=True)
class NoPosition(Position):
    """Nothing: a causal mask alone, or an order of its own, tells positions apart (NoPE, arXiv:2305.19466)."""

    exported = True
