"""Shapes and dtypes of what forward saves for backward on a GPU besides its results."""

import torch


def aux_shapes(
    num_tokens: int, num_heads: int, num_sequences: int
) -> tuple[tuple[int, int], tuple[int, int], tuple[int, int, int]]:
    """Returns the shapes of row_carry, row_tile and block_stop.

    block_stop has one pair of tiles per block of 64 rows, and one spare pair per sequence (see blocks.py).
    """
    rows = (num_heads, num_tokens)
    return rows, rows, (num_heads, num_tokens // 64 + num_sequences, 2)


def carry_dtype(dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype of the carry.

    Backward recovers earlier carries by subtraction. In float32, that would cost float32 results their last digits.
    """
    return torch.float64 if dtype == torch.float32 else torch.float32
