"""Stick-breaking attention, arXiv:2410.17980, on a backend of its own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..keys import Keys
from ..mixer import Backend, Mixer


@dataclass(frozen=True)
class StickBreaking(Mixer):
    """A_ij = β_ij Π_{i<k<j} (1 − β_kj), β = σ(scale · q·k), over strictly earlier keys   (Eq. 5)

    i: key, j: query. With `remainder`, the unspent stick goes to the query's own value (Eq. 13).
    """

    remainder: bool

    # A backend for another platform needs a class and an entry here.
    backend = Backend("SSSCALE_STICKBREAKING", {"cpu": "ssscale_vllm.backends.stickbreaking_cpu.StickBreakingBackend"})

    @classmethod
    def options(cls, keys: Keys) -> dict[str, Any]:
        keys.skip("skip_below")  # a bound for the GPU kernel in training; nothing is skipped here
        keys.skip("keys_per_group")  # chooses a GPU kernel in training
        return {"remainder": keys.take("remainder", bool)}

    def backend_arguments(self) -> dict[str, Any]:
        return {"remainder": self.remainder}


MIXER = StickBreaking
