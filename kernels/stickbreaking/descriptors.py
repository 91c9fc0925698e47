"""TMA descriptors, through which the loops over whole tiles load K and V.

One thread then loads a tile, and no thread computes addresses or holds them in registers.
"""

from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

KEYS = 64  # of a tile


def _fits(x: Tensor) -> bool:
    """Whether TMA can load tiles of x [T, K, H]: whole ones in 16 bits, of adjacent heads that are aligned to 16 bytes."""
    head_dim, step = x.shape[2], x.stride(0)
    power_of_two = head_dim & (head_dim - 1) == 0 and head_dim >= 16
    aligned = x.data_ptr() % 16 == 0 and step * x.element_size() % 16 == 0
    return (
        x.element_size() == 2
        and power_of_two
        and aligned
        and x.stride(1) == head_dim
        and x.shape[0] >= KEYS
        and step > 0
    )


def _permuted(x: Tensor) -> TensorDescriptor:
    """Describes tiles of 64 rows of x [T, K, H] that start anywhere, in the order of `tile.key_of_column`.

    Column 8j + 2c + e of a tile holds key 16c + 2j + e, so a tile has dimensions j, c, e and the head dim.
    """
    rows, step = x.shape[0], x.stride(0)
    return TensorDescriptor(
        x,
        [rows - KEYS + 1, 8, 4, 2, x.shape[1] * x.shape[2]],
        [step, 2 * step, 16 * step, step, 1],
        [1, 8, 4, 2, x.shape[2]],
    )


def descriptors(k: Tensor, v: Tensor, use: bool) -> tuple[TensorDescriptor | None, TensorDescriptor | None]:
    """Returns descriptors of k and v [T, K, H], or (None, None) where pointers must do, or if not `use`."""
    if use and _fits(k) and _fits(v):
        return _permuted(k), _permuted(v)
    return None, None
