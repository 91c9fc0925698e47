"""Position methods: rotary positions with their scalings, ALiBi, or none."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .keys import NUMBER, Keys

if TYPE_CHECKING:
    from torch import Tensor

REFUSED = {
    "fire": "FIRE computes a bias from the positions of query and key, which no attention kernel of vLLM does",
}


@dataclass(frozen=True)
class Position:
    """A position method that leaves q and k as they are. window: keys that a query attends to, or None."""

    name: str
    window: int | None

    def tables(self, positions: Tensor, head_dim: int) -> tuple[Tensor, Tensor] | None:
        """Returns cos and sin [T, 1, H / 2] float32 for positions [T], or None."""
        return None

    def slopes(self, num_heads: int) -> list[float] | None:
        """Returns the slope m of each query head, which adds −m · (i − j) to q·k, or None."""
        return None


@dataclass(frozen=True)
class Llama3:
    """The scaling of Llama 3.1: with r turns in `length` tokens, a frequency is divided by `factor` if r < low, kept if
    r > high, and interpolated between them.
    """

    factor: float
    low: float
    high: float
    length: int

    def scaled(self, theta: Tensor) -> Tensor:
        kept = ((self.length * theta / (2 * math.pi) - self.low) / (self.high - self.low)).clamp(0.0, 1.0)
        return (1 - kept) * theta / self.factor + kept * theta


@dataclass(frozen=True)
class RoPE(Position):
    """Rotates q and k by the angles p · base^(−2k / H)   (arXiv:2104.09864, Eq. 15)

    The positions p are divided by `divisor`. scaled_base(H): the base, which `ntk` increases. llama3: the scaling of
    frequencies, or None.
    """

    base: float
    divisor: float
    ntk: float
    llama3: Llama3 | None

    def scaled_base(self, head_dim: int) -> float:
        return self.base * self.ntk ** (head_dim / (head_dim - 2)) if self.ntk != 1.0 else self.base

    def tables(self, positions: Tensor, head_dim: int) -> tuple[Tensor, Tensor]:
        import torch

        exponent = torch.arange(0, head_dim, 2, device=positions.device, dtype=torch.float32) / head_dim
        theta = self.scaled_base(head_dim) ** -exponent
        theta = theta if self.llama3 is None else self.llama3.scaled(theta)
        angle = (positions.float() / self.divisor)[:, None, None] * theta
        return angle.cos(), angle.sin()


@dataclass(frozen=True)
class ALiBi(Position):
    """Adds −m_h · (i − j), m_h = 2^(−8h / N)   (arXiv:2108.12409, Eq. 1; Section 3 if N is not a power of two)"""

    def slopes(self, num_heads: int) -> list[float]:
        power = 1 << (num_heads.bit_length() - 1)
        order = [h + 1 if h < power else h - power + 0.5 for h in range(num_heads)]
        return [2 ** (-8 / power * h) for h in order]


def read_position(keys: Keys) -> Position:
    """Reads the section `position`. Raises ValueError for a method or scaling that cannot be served."""
    method, window = keys.take("method", str), keys.take("window", int, None)
    if window is not None and window < 1:
        raise ValueError(f"config.json: {keys.named('window')}={window} is not understood")
    shared: dict[str, Any] = {"name": method, "window": window}
    options = keys.section(method)
    if method == "rope":
        found: Position = _rope(options, shared)
    elif method == "alibi":
        found = ALiBi(**shared)
    else:  # a method that is refused is refused with the first layer that uses it
        found = Position(**shared)
    options.done()
    keys.done()
    return found


def _rope(keys: Keys, shared: dict[str, Any]) -> RoPE:
    base, factor = (float(keys.take(key, NUMBER)) for key in ("base", "factor"))
    scaling = keys.take("scaling", str)
    if scaling == "dynamic_ntk":
        raise ValueError(
            f"config.json: {keys.named('scaling')}=dynamic_ntk rotates by a text's final length, which a server does not "
            "know when the text begins: export the model with scaling=ntk"
        )
    if scaling not in ("none", "linear", "ntk", "llama3"):
        raise ValueError(f"config.json: {keys.named('scaling')}={scaling!r} is not known to this vLLM plugin")
    if scaling == "none" and factor != 1.0:
        raise ValueError(f"config.json: {keys.named('factor')}={factor:g} has no effect with scaling=none")
    llama3 = None
    if scaling == "llama3":
        low, high = (float(keys.take(f"{name}_freq_factor", NUMBER)) for name in ("low", "high"))
        if not low < high:
            raise ValueError(
                f"config.json: {keys.named('low_freq_factor')}={low:g} is not below high_freq_factor={high:g}"
            )
        llama3 = Llama3(factor, low, high, keys.take("train_length", int))
    keys.skip("train_length", "low_freq_factor", "high_freq_factor")  # the other scalings do not read them
    return RoPE(
        **shared,
        base=base,
        divisor=factor if scaling == "linear" else 1.0,
        ntk=factor if scaling == "ntk" else 1.0,
        llama3=llama3,
    )
