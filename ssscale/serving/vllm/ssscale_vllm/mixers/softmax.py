"""Softmax attention, on vLLM's own backends."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from ..keys import Keys
from ..mixer import Mixer


@dataclass(frozen=True)
class Softmax(Mixer):
    """o_i = Σ_{j ≤ i} softmax_j(scale · q_i·k_j + bias_ij) v_j   (arXiv:1706.03762, Eq. 1)"""

    supported: ClassVar[tuple[str, ...]] = ("rope", "nope", "alibi")

    @classmethod
    def options(cls, keys: Keys) -> dict[str, Any]:
        keys.skip("backend")  # the kernel in training
        return {}


MIXER = Softmax
