"""The base class of mixers: what a file in `mixers` tells the model about one of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from .keys import Keys
from .positions import REFUSED

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Backend:
    """An attention backend of a mixer's own. name: for vLLM. path: of its class.

    platforms: those of vLLM that it runs on (`cpu`, `cuda`). module, package: what it imports, and what provides that.
    """

    name: str
    path: str
    platforms: tuple[str, ...]
    module: str
    package: str


@dataclass(frozen=True)
class Mixer:
    """A mixer with its options. Its layers run on vLLM's attention, or on `backend`.

    positions: the methods that the export lets the mixer's layers use. windowed: whether they use the window.
    """

    name: str
    positions: tuple[str, ...]
    windowed: bool
    supported: ClassVar[tuple[str, ...]] = ("nope",)  # the methods that can be served
    backend: ClassVar[Backend | None] = None

    @classmethod
    def read(cls, name: str, keys: Keys) -> Mixer:
        """Reads the section `mixer.NAME`. Raises ValueError for an option that cannot be served."""
        shared = {
            "name": name,
            "positions": tuple(keys.take("positions", list)),
            "windowed": keys.take("windowed", bool),
        }
        found = cls(**shared, **cls.options(keys))
        keys.done()
        return found

    @classmethod
    def options(cls, keys: Keys) -> dict[str, Any]:
        return {}

    def place(self, method: str) -> bool:
        """Returns whether the mixer's layers use this position method. Raises ValueError if that cannot be served."""
        if method not in self.positions:
            return False
        if method not in self.supported:
            reason = REFUSED.get(method, f"this vLLM plugin does not serve {method} in layers of {self.name}")
            raise ValueError(f"config.json: position.method={method} cannot be served: {reason}")
        return True

    def layer_weights(self, num_heads: int) -> dict[str, Shape]:
        """The weights of each layer besides its projections. The ranks of tensor parallelism split the first axis."""
        return {}

    def shared_weights(self, length: int) -> dict[str, Shape]:
        """The weights that the mixer's layers share. length: tokens per training row."""
        return {}

    def prepare(self, positions: Tensor, window: int | None, shared: Mapping[str, Tensor]) -> Tensor | None:
        """Returns what the mixer's layers share for a batch. positions: [T], each within its own text."""
        return None

    def factor(self, prepared: Tensor | None, weights: Mapping[str, Tensor]) -> Tensor | None:
        """Returns the float32 factor of q, [T, N or 1], or None."""
        return None

    def backend_arguments(self) -> dict[str, Any]:
        """Arguments for `backend` besides those that vLLM gives to all."""
        return {}
