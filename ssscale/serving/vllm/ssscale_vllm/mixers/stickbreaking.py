"""Stick-breaking attention, arXiv:2410.17980, on a backend of its own, which needs the package ssscale-kernels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..keys import NUMBER, Keys
from ..mixer import Backend, Mixer


@dataclass(frozen=True)
class StickBreaking(Mixer):
    """A_ij = β_ij Π_{i<m<j} (1 − β_mj), β_ij = σ(scale · q_j·k_i)   (Eq. 1)

    Query j gives each earlier key i the weight A_ij; m counts the keys between them. With `remainder`, the unspent
    stick goes to the query's own value (Eq. 13).
    """

    remainder: bool
    skip_below: float  # as in training: a GPU skips keys once all queries of a tile have less of their stick left

    backend = Backend(
        name="SSSCALE_STICKBREAKING",
        path="ssscale_vllm.backends.stickbreaking.StickBreakingBackend",
        platforms=("cpu", "cuda"),
        module="ssscale_kernels",
        package="ssscale-kernels",
    )

    @classmethod
    def options(cls, keys: Keys) -> dict[str, Any]:
        skip_below = float(keys.take("skip_below", NUMBER))
        if not 0 <= skip_below < 1:
            raise ValueError(f"config.json: {keys.named('skip_below')}={skip_below:g} is not understood")
        return {"remainder": keys.take("remainder", bool), "skip_below": skip_below}

    def backend_arguments(self) -> dict[str, Any]:
        return {"remainder": self.remainder, "skip_below": self.skip_below}


MIXER = StickBreaking
