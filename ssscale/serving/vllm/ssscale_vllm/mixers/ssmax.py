"""Scalable-Softmax (SSMax), arXiv:2501.19399: softmax attention with a factor of q that grows with the position."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..keys import NUMBER, Keys
from ..mixer import Shape
from .softmax import Softmax

if TYPE_CHECKING:
    from torch import Tensor

VARIANTS = ("learned", "fixed", "bias", "pn")


@dataclass(frozen=True)
class SSMax(Softmax):
    """softmax((s ln n) z) with n = number of visible keys   (Eq. 2); `bias`: s ln n + b (Eq. 4); `pn`: s p_n + b (Eq. 3)

    fixed: the constant s of the variant `fixed`, otherwise None.
    """

    variant: str
    fixed: float | None

    # A bias would have to be multiplied by the factor too; vLLM adds it after q·k.
    supported = ("rope", "nope")

    @classmethod
    def options(cls, keys: Keys) -> dict[str, Any]:
        keys.skip("backend", "bias")  # the kernel in training; the start of b
        variant, scale = keys.take("variant", str), keys.take("scale", NUMBER)
        if variant not in VARIANTS:
            raise ValueError(f"config.json: {keys.named('variant')}={variant!r} is not known to this vLLM plugin")
        return {"variant": variant, "fixed": float(scale) if variant == "fixed" else None}

    def layer_weights(self, num_heads: int) -> dict[str, Shape]:
        names = {"learned": ("s",), "fixed": (), "bias": ("s", "b"), "pn": ("s", "b")}[self.variant]
        return dict.fromkeys(names, (num_heads,))

    def shared_weights(self, length: int) -> dict[str, Shape]:
        return {"pn": (length,)} if self.variant == "pn" else {}

    def prepare(self, positions: Tensor, window: int | None, shared: Mapping[str, Tensor]) -> Tensor:
        """Returns ln n of each token, or p_n: [T] float32. The last p_n serves all larger n."""
        n = positions + 1
        if window is not None and self.windowed:
            n = n.clamp(max=window)
        if "pn" not in shared:
            return n.float().log()
        pn = shared["pn"].float()
        return pn[n.clamp(max=len(pn)) - 1]

    def factor(self, prepared: Tensor | None, weights: Mapping[str, Tensor]) -> Tensor:
        """Returns s ln n + b, [T, N or 1] float32."""
        assert prepared is not None
        s = weights["s"].float() if "s" in weights else self.fixed
        found = prepared[:, None] * s
        return found + weights["b"].float() if "b" in weights else found


MIXER = SSMax
