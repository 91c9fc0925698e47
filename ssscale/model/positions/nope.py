"""No positions."""

from dataclasses import dataclass

from ssscale.config.registry import POSITIONS
from ssscale.model.positions.base import Position


@POSITIONS.register("nope")
@dataclass(frozen=True)
class NoPosition(Position):
    """No positions: the causal mask alone, or the mixer's own order, distinguishes them (NoPE, arXiv:2305.19466)."""

    exported = True
