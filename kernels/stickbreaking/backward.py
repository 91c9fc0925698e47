"""The backward kernels: two phases without atomics, bitwise reproducible.

Phase one walks the key tiles of each row block from where forward stopped toward the query, and computes dQ. In this
direction Σ_{i' ≤ i} g_i' is a plain running sum; in the other it would cancel. Phase one stores the carry and this sum
for every (row, key tile). Phase two reads them while it walks down the rows of a key tile for dK and dV. Slices of rows
keep this scratch linear in the number of tokens.

A row block takes the exact algebra of tile.py from the tile on that forward has recorded (blocks.py), and the fast one before.
"""

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from . import half
from .descriptors import descriptors
from .dkv import dkv_kernel
from .dq import dq_kernel
from .forward import LOG2_E, constants, forward_config, parts
from .launching import cdiv, launch_kernel
from .scales import rest_maxima
from .settings import GROUP_BYTES, Config, grid, head_group, last_contiguous, launch

# Scratch takes 8 bytes per query, head and key tile. Slices keep it, and the float32 sums of dK and dV that several slices
# need, under this many bytes per row of the whole.
SCRATCH_BYTES_PER_ROW = 2048


class BackwardConfig(NamedTuple):
    dq: Config
    dkv: Config


def backward_config(head_dim: int, parts: int = 1, dtype: torch.dtype = torch.bfloat16) -> BackwardConfig:
    """Returns launch settings. docs/log/2026-11-24-sixteen-keys.md has the measured ones and what is predicted.

    parts: in how many parts the tensor cores multiply weights and dz, see `forward.parts`.
    """
    if dtype == torch.float32:
        config = forward_config(head_dim, dtype)
        return BackwardConfig(config, config)
    if head_dim <= 64:
        # A third program fits a multiprocessor. Without TMA, the addresses of dq would spill, and so would two parts.
        dq = 168 if head_dim in (16, 32, 64) else None
        dkv = 168 if head_dim <= 32 and parts == 1 else None
        return BackwardConfig(Config(64, 64, 4, 3, dq), Config(64, 64, 4, 3, dkv))
    # Three stages of dkv do not fit shared memory.
    return BackwardConfig(Config(128, 64, 8, 3), Config(128, 64, 8, 2))


def hoists_in(kernel: str, config: Config, head_dim: int, convert: bool) -> int:
    """Returns in which loops of "dq" or "dkv" addresses and masks are computed before the loop.

    0: in none, 1: in the fast loop over whole tiles, 2: in all. Too many of them would fill the registers.
    """
    if config.num_stages == 1:
        return 0
    if config.max_registers is not None:
        return 1 if kernel == "dq" else 0
    return 2 if head_dim <= 64 or (convert and head_dim == 128) else 0


def walks_by_words(head_dim: int, convert: bool) -> bool:
    """Whether phase two finds its row blocks in words of bits, otherwise in a list of runs.

    The dkv kernel is 3 to 4 % faster by words at 64 dims and 2 % slower at 128, where registers are scarce. fp16 operands over
    80 or 128 dims and float32 would spill (docs/log/2026-11-26-trained-sticks.md).
    """
    return convert and head_dim <= 64


def launch_constants(kernel: str, config: Config, num_heads: int, head_dim: int, convert: bool) -> dict[str, int]:
    """Returns the constants of "dq" or "dkv" that follow from launch settings."""
    hoist = hoists_in(kernel, config, head_dim, convert)
    if kernel == "dq":
        return {"HOIST": hoist}
    # Strides of the fp16 copies that dq writes, which lie side by side. Those of other operands are not known beforehand.
    return {"HOIST": hoist, "ROW_STRIDE": num_heads * head_dim if convert else 0}


class _Scratch(NamedTuple):
    """Sizes and memory of what phase one leaves for phase two."""

    num_tiles: int
    num_slots: int
    slice_slots: int  # row blocks of phase one per slice
    num_key_slots: int
    max_blocks: int  # row blocks of phase two per sequence and slice, a power of two, or 0 without a list of them
    sums: Tensor  # [N, tiles, 2, rows]: the carry, and Σ g over farther keys
    live: Tensor | None


def _scratch(
    q: Tensor, k: Tensor, num_sequences: int, config: BackwardConfig, max_queries: int, max_keys: int, per_row: int,
    by_words: bool,
) -> _Scratch:  # fmt: skip
    """Allocates 8 bytes per query, head and key tile, in slices of at most `per_row` bytes per row of the whole."""
    (num_tokens, num_heads, _), num_keys = q.shape, k.shape[0]
    rows, key_block, dkv_rows = config.dq.row_block, config.dq.key_block, config.dkv.row_block
    num_tiles = cdiv(max(1, min(max_keys, num_keys)), key_block)
    num_slots = num_tokens // rows + num_sequences
    if 8 * num_tiles > per_row:  # several slices, whose float32 sums count, but leave a quarter of the bound to scratch
        per_row = max(per_row // 4, per_row - 8 * k.numel() // (num_tokens * num_heads))
    slice_slots = min(num_slots, max(1, num_slots * per_row // (8 * num_tiles)))
    sums = q.new_empty((num_heads, num_tiles, 2, slice_slots * rows), dtype=torch.float32)
    num_key_slots = num_keys // key_block + num_sequences
    max_blocks, live = 0, None
    if not by_words:
        max_blocks = triton.next_power_of_2(cdiv(min(slice_slots * rows, max(1, max_queries)), dkv_rows))
        live = q.new_empty((num_heads, num_key_slots, max_blocks + 2), dtype=torch.int32)
    return _Scratch(num_tiles, num_slots, slice_slots, num_key_slots, max_blocks, sums, live)


def backward(
    grad_o: Tensor, grad_log_rest: Tensor | None, q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor,
    q_offsets: Tensor | None, row_carry: Tensor, row_tile: Tensor, block_stop: Tensor, maxima: Tensor, max_queries: int,
    max_keys: int, scale: float, skip_below: float, config: BackwardConfig | None = None,
    scratch_bytes_per_row: int = SCRATCH_BYTES_PER_ROW, group_bytes: int = GROUP_BYTES, convert: bool | None = None,
    tma: bool = True,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Runs the backward kernels, in float32 for up to 64 dims. Returns dq, dk, dv and d_log_rest_in.

    Row blocks must not be larger than forward's, which decides per block where to stop and which algebra holds.
    """
    q, k, v, grad_o = (last_contiguous(x) for x in (q, k, v, grad_o))
    convert = half.converts(q) if convert is None else convert
    config = config or backward_config(q.shape[2], parts(q, convert), q.dtype)
    assert config.dq.row_block % config.dkv.row_block == 0, "a block of phase two must not straddle two slices"
    grad_log_rest = None if grad_log_rest is None else grad_log_rest.float().contiguous()
    dq = torch.empty_like(q, memory_format=torch.contiguous_format)
    d_rest_in = q.new_empty(q.shape[:2], dtype=torch.float32)
    if q.shape[0] == 0 or k.shape[0] == 0:
        d_rest_in.copy_(torch.zeros_like(d_rest_in) if grad_log_rest is None else grad_log_rest)
        return dq.zero_(), torch.zeros_like(k), torch.zeros_like(v), d_rest_in
    q_half, k_half, grad_o_half, maxima_of_rest = q, k, grad_o, None
    if convert:
        k_half, maxima = half.operands(maxima, k, grad_o, cu_q, cu_k)
        q_half, grad_o_half = (torch.empty(x.shape, dtype=torch.float16, device=x.device) for x in (q, grad_o))
        maxima_of_rest = None if grad_log_rest is None else rest_maxima(grad_log_rest, cu_q)
    by_words = walks_by_words(q.shape[2], convert)
    scratch = _scratch(q, k, cu_q.shape[0] - 1, config, max_queries, max_keys, scratch_bytes_per_row, by_words)
    several = scratch.slice_slots < scratch.num_slots
    # Not in the dtype of k_half: the scales of fp16 operands do not hold for results, which fp16 would round to zero.
    dk, dv = (torch.empty(x.shape, dtype=torch.float32 if several else x.dtype, device=x.device) for x in (k, v))
    group = q.shape[1] // k.shape[1]
    cu = (cu_q, cu_k, q_offsets, maxima if convert else None, maxima_of_rest)
    common_constants = {
        "HAS_OFFSET": q_offsets is not None,
        "HAS_REST": grad_log_rest is not None,
    }
    of_dq, of_dkv = (
        constants(q, c, group, convert, skip_below)
        | common_constants
        | launch_constants(kernel, c, q.shape[1], q.shape[2], convert)
        for kernel, c in zip(("dq", "dkv"), config, strict=True)
    )
    of_dkv |= {"DQ_ROWS": config.dq.row_block}
    for first in range(0, scratch.num_slots, scratch.slice_slots):
        last = min(first + scratch.slice_slots, scratch.num_slots)
        _launch_dq(
            (q, k_half, v, grad_o, q_half, grad_o_half, grad_log_rest, dq, d_rest_in, row_carry, row_tile, block_stop), cu,
            scratch, first, last, scale, head_group(k, group, group_bytes), descriptors(k_half, v, tma),
            of_dq, launch(config.dq), convert or first > 0,
        )  # fmt: skip
        _launch_dkv(
            (q_half, k_half, v, grad_o_half, dk, dv, block_stop), cu, scratch, first, last, scale,
            head_group(q, 1, group_bytes // group), of_dkv | {"ADD": first > 0}, launch(config.dkv),
        )  # fmt: skip
    return dq, dk.to(dq.dtype), dv.to(dq.dtype), d_rest_in


Tensors = tuple[Any, ...]  # some are None


def _strides(*tensors: Tensor | None) -> list[int]:
    """Returns the strides of tokens and of heads."""
    return [stride for x in tensors if x is not None for stride in x.stride()[:2]]


def _launch_dq(
    tensors: Tensors, layout: Tensors, scratch: _Scratch, first: int, last: int, scale: float, heads: int,
    described: Tensors, constants: dict[str, Any], options: dict[str, int | None], follows: bool,
) -> None:  # fmt: skip
    """Runs phase one on the row blocks first … last − 1."""
    q, k, v, grad_o, *others, block_stop = tensors
    num_sequences = layout[0].shape[0] - 1
    programs, *placed = grid(last - first, num_sequences, q.shape[1], heads)
    numbers = (
        q.shape[0], k.shape[0], q.shape[1], *placed, num_sequences, first, last, block_stop.shape[1], scratch.num_tiles,
        scratch.sums.shape[3], *_strides(q, k, v, grad_o), scale, scale * LOG2_E,
    )  # fmt: skip
    tensors = (q, k, v, *described, grad_o, *others, block_stop, scratch.sums, *layout)
    launch_kernel(dq_kernel, programs, tensors, numbers, constants | options, follows)


def _launch_dkv(
    tensors: Tensors, layout: Tensors, scratch: _Scratch, first: int, last: int, scale: float, heads: int,
    constants: dict[str, Any], options: dict[str, int | None],
) -> None:  # fmt: skip
    """Runs phase two on all key tiles, for the rows of the row blocks first … last − 1."""
    q, k, v, grad_o, _, _, block_stop = tensors
    num_sequences = layout[0].shape[0] - 1
    programs, *placed = grid(scratch.num_key_slots, num_sequences, k.shape[1], heads)
    numbers = (
        q.shape[0], k.shape[0], k.shape[1], *placed, num_sequences, first, last, scratch.num_key_slots, block_stop.shape[1],
        scratch.num_tiles, scratch.sums.shape[3], *_strides(q, k, v, grad_o), scale, scale * LOG2_E,
    )  # fmt: skip
    constants = constants | {"MAX_BLOCKS": scratch.max_blocks} | options
    launch_kernel(dkv_kernel, programs, (*tensors, scratch.sums, scratch.live, *layout), numbers, constants, True)
