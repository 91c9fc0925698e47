"""TMA descriptors, through which the loops over whole tiles load K and V.

One thread then loads a tile, and no thread computes addresses or holds them in registers.
"""

from typing import Any

from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia import hopper
from triton.tools.tensor_descriptor import TensorDescriptor

KEYS = 64  # of a tile


def fits(x: Tensor) -> bool:
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


def _permuted(x: Tensor, gluon: bool) -> Any:
    """Describes tiles of 64 rows of x [T, K, H] that start anywhere, in the order of `tile.key_of_column`.

    Column 8j + 2c + e of a tile holds key 16c + 2j + e, so a tile has dimensions j, c, e and the head dim.
    """
    rows, step, head_dim = x.shape[0], x.stride(0), x.shape[2]
    shape = [rows - KEYS + 1, 8, 4, 2, x.shape[1] * head_dim]
    strides, block = [step, 2 * step, 16 * step, step, 1], [1, 8, 4, 2, head_dim]
    if gluon:
        layout = gl.NVMMASharedLayout(min(128, 2 * head_dim), 16, 5)
        return hopper.TensorDescriptor(x, shape, strides, block, layout)
    return TensorDescriptor(x, shape, strides, block)


def of_rows(x: Tensor, rows: int) -> hopper.TensorDescriptor:
    """Describes blocks of `rows` tokens of one head of x [T, N, H], contiguous, for kernels in Gluon."""
    tokens, heads, head_dim = x.shape
    layout = gl.NVMMASharedLayout(min(128, 2 * head_dim), 16, 2)
    return hopper.TensorDescriptor(x, [tokens, heads * head_dim], [heads * head_dim, 1], [rows, head_dim], layout)


def descriptors(k: Tensor, v: Tensor, use: bool, gluon: bool = False) -> tuple[Any, Any]:
    """Returns descriptors of k and v [T, K, H], or (None, None) where pointers must do, or if not `use`.

    gluon: for kernels in Gluon, whose descriptors also give the layout in shared memory.
    """
    if use and fits(k) and fits(v):
        return _permuted(k, gluon), _permuted(v, gluon)
    return None, None
