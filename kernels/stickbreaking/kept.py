"""What forward keeps for backward on a GPU besides its results: shapes and dtypes."""

import torch


def aux_shapes(
    num_tokens: int, num_heads: int, num_sequences: int
) -> tuple[tuple[int, int], tuple[int, int], tuple[int, int]]:
    """Shapes of row_carry, row_tile and block_stop. Blocks of 64 rows, one spare a sequence: see forward.py's `locate`."""
    rows = (num_heads, num_tokens)
    return rows, rows, (num_heads, num_tokens // 64 + num_sequences)


def carry_dtype(dtype: torch.dtype) -> torch.dtype:
    """Backward subtracts its way back along the carry; in float32 that would cost a float32 result its last digits."""
    return torch.float64 if dtype == torch.float32 else torch.float32
