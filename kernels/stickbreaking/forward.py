"""The forward kernel and its launch: visits key tiles from the nearest to the farthest (walk.py).

forward_hopper.py has the form for Hopper.
"""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import blocks, half, tile
from .descriptors import descriptors, fits
from .forward_hopper import forward_hopper_kernel
from .kept import aux_shapes, carry_dtype
from .launching import begin, launch_kernel
from .settings import COUNTS, GROUP_BYTES, Config, grid, head_group, last_contiguous, launch, log2_threshold
from .walk import initial_state, save_sticks, scale_of_results, walk_again, walk_rows, walk_tiles

LOG2_E = 1.4426950408889634


def forward_config(head_dim: int, dtype: torch.dtype = torch.bfloat16) -> Config:
    """Returns launch settings. docs/log/2026-11-24-sixteen-keys.md has the measured ones and what is predicted."""
    if dtype == torch.float32:
        # Both parts of the operands of wider tiles would not fit the registers.
        return Config(64, 64 if head_dim <= 32 else 32, 4, 1)
    if head_dim <= 64:
        return Config(64, 64, 4, 3, 128 if head_dim <= 32 else 168)
    return Config(128, 64, 8, 3)


def hopper_config(head_dim: int) -> Config:
    """Returns launch settings of forward_hopper.py."""
    return Config(64, 64, 4, 3, 128 if head_dim <= 32 else 168) if head_dim <= 64 else Config(128, 64, 8, 3)


@functools.cache
def overlaps(device: torch.device, head_dim: int) -> bool:
    """Whether there is a form of forward whose products run beside the algebra (forward_hopper.py)."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0) and head_dim in (32, 64, 128)


@triton.jit
def _run(
    needed, sequence, block, head,
    q_ptr, k_ptr, v_ptr, k_descriptor, v_descriptor, o_ptr, log_rest_in_ptr, log_rest_ptr, row_carry_ptr, row_tile_ptr,
    block_stop_ptr, cu_q_ptr, cu_k_ptr, offset_ptr, maxima_ptr, num_tokens, num_keys_total, num_heads, num_stop_slots,
    max_queries, max_keys, sq_t, sq_n, sk_t, sk_n, sv_t, sv_n, first_chunk, chunk, logit_scale, threshold,
    AGAIN: tl.constexpr, H: tl.constexpr, BH: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, KV_GROUP: tl.constexpr,
    HAS_OFFSET: tl.constexpr, HAS_REST: tl.constexpr, HALF: tl.constexpr, PARTS: tl.constexpr, SKIPS: tl.constexpr,
):  # fmt: skip
    """Walks and saves a row block, AGAIN with the exact algebra as far as `needed`.

    Returns from which tile on the exact algebra was taken, and from which on it has to be taken.
    """
    q_start, q_len, k_start, k_len, offset = blocks.lengths(
        cu_q_ptr, cu_k_ptr, offset_ptr, sequence, num_tokens, num_keys_total, HAS_OFFSET
    )
    row = block * ROWS + tl.arange(0, ROWS)
    position, whole, seen = blocks.visible(block, row, q_len, k_len, offset, ROWS, KEYS)
    row_ok = row < q_len
    token = (q_start + row).to(tl.int64)
    dims = tl.arange(0, BH)
    q = blocks.load_rows(q_ptr, token, sq_t, head, sq_n, row_ok, dims, H)
    if HALF and not AGAIN:
        half.enter(maxima_ptr, sequence, half.Q, q)
    entering = tl.zeros([ROWS], tl.float32)
    if HAS_REST:
        entering = tl.load(log_rest_in_ptr + token * num_heads + head, mask=row_ok, other=0.0).to(tl.float32)
    # Rows after the sequence's end must not delay the exit.
    entering = tl.where(row_ok, entering * tile.LOG2_E, -1e30).to(row_carry_ptr.dtype.element_ty)
    source = (k_ptr, v_ptr, k_descriptor, v_descriptor, sk_t, sk_n, sv_t, sv_n, k_start, head // KV_GROUP)
    scale = scale_of_results(q_len, k_len, max_queries, max_keys, maxima_ptr, sequence, HALF)
    walk = (
        initial_state(entering, ROWS, BH), entering, q, source, position, whole, seen, 0, k_len, logit_scale, threshold,
        first_chunk, chunk,
    )  # fmt: skip
    if AGAIN:
        state, stop, exact_from, needed = walk_again(*walk, needed, walk_tiles, ROWS, KEYS, H, BH, HALF, PARTS, SKIPS)
    else:
        state, stop, exact_from, needed = walk_rows(*walk, walk_tiles, ROWS, KEYS, H, BH, HALF, PARTS, SKIPS)
    rows = (token * num_heads + head)[:, None]
    o = o_ptr + rows * H + dims[None, :]
    tl.store(o, (state[0] * scale).to(o_ptr.dtype.element_ty), mask=row_ok[:, None] & (dims < H)[None, :])
    save_sticks(
        state, stop, exact_from, log_rest_ptr, row_carry_ptr, row_tile_ptr, block_stop_ptr, cu_q_ptr, sequence, head, block,
        token, row_ok, num_tokens, num_heads, q_len, num_stop_slots, threshold, ROWS,
    )  # fmt: skip
    return exact_from, needed


@triton.jit(do_not_specialize=COUNTS)
def forward_kernel(
    q_ptr, k_ptr, v_ptr, k_descriptor, v_descriptor, o_ptr, log_rest_in_ptr, log_rest_ptr, row_carry_ptr, row_tile_ptr,
    block_stop_ptr, cu_q_ptr, cu_k_ptr, offset_ptr, maxima_ptr,
    num_tokens, num_keys_total, num_heads, heads_beside, slots_each, num_sequences, num_slots, num_stop_slots, max_queries,
    max_keys, sq_t, sq_n, sk_t, sk_n, sv_t, sv_n, first_chunk, chunk, logit_scale, threshold,
    H: tl.constexpr, BH: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, KV_GROUP: tl.constexpr, HAS_OFFSET: tl.constexpr,
    HAS_REST: tl.constexpr, HALF: tl.constexpr, PARTS: tl.constexpr, SKIPS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    begin(EARLY)
    head, slot = blocks.assign(heads_beside, num_sequences, slots_each, True)
    if (head >= num_heads) | (slot >= num_slots):
        return
    sequence, block = blocks.locate(cu_q_ptr, slot, num_sequences, ROWS)
    _, q_len = blocks.bounds(cu_q_ptr, sequence, num_tokens)
    if (block < 0) | (block * ROWS >= q_len):
        return
    given = (
        q_ptr, k_ptr, v_ptr, k_descriptor, v_descriptor, o_ptr, log_rest_in_ptr, log_rest_ptr, row_carry_ptr, row_tile_ptr,
        block_stop_ptr, cu_q_ptr, cu_k_ptr, offset_ptr, maxima_ptr, num_tokens, num_keys_total, num_heads, num_stop_slots,
        max_queries, max_keys, sq_t, sq_n, sk_t, sk_n, sv_t, sv_n, first_chunk, chunk, logit_scale, threshold,
    )  # fmt: skip
    exact_from, needed = _run(
        0, sequence, block, head, *given, False, H, BH, ROWS, KEYS, KV_GROUP, HAS_OFFSET, HAS_REST, HALF, PARTS, SKIPS
    )  # fmt: skip
    while needed < exact_from:
        # The compiler does not know that this is 0. So nothing that a second walk needs is in registers during the first one.
        zero = needed >> 30
        exact_from, needed = _run(
            needed, sequence + zero, block + zero, head + zero, *given,
            True, H, BH, ROWS, KEYS, KV_GROUP, HAS_OFFSET, HAS_REST, HALF, PARTS, SKIPS,
        )  # fmt: skip


def parts(q: Tensor, convert: bool) -> int:
    """Returns in how many parts the tensor cores multiply weights and dz.

    fp16 operands that half.py does not scale need two: one would round like the result.
    """
    return 2 if q.dtype == torch.float16 and not convert else 1


def constants(q: Tensor, config: Config, group: int, convert: bool, skip_below: float) -> dict[str, int | bool]:
    """Returns the compile-time constants that all kernels share."""
    head_dim = q.shape[2]
    return {
        "H": head_dim,
        "BH": max(16, triton.next_power_of_2(head_dim)),
        "ROWS": config.row_block,
        "KEYS": config.key_block,
        "KV_GROUP": group,
        "HALF": convert,
        "PARTS": parts(q, convert),
        # In float32, the loop for the tiles near the diagonal would not fit the registers.
        "SKIPS": skip_below >= tile.LARGEST_SKIPPED and q.dtype != torch.float32,
    }


def forward(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, q_offsets: Tensor | None, log_rest_in: Tensor | None,
    max_keys: int, scale: float, skip_below: float, config: Config | None = None, first_chunk: int = 2,
    chunk: int = 64, group_bytes: int = GROUP_BYTES, max_queries: int | None = None, convert: bool | None = None,
    tma: bool = True, overlap: bool = True,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Runs the forward kernel. Returns o, log_rest and what backward needs (see `ops.forward_op`).

    tma: loads tiles through descriptors where the tensors allow it. The results have the same bits without.
    overlap: runs the form for Hopper where there is one (`overlaps`). The results have the same bits without.

    block_stop: see blocks.py.
    """
    q, k, v = last_contiguous(q), last_contiguous(k), last_contiguous(v)
    num_tokens, num_heads, head_dim = q.shape
    num_sequences, group = cu_q.shape[0] - 1, num_heads // k.shape[1]
    convert = half.converts(q) if convert is None else convert
    overlap = overlap and tma and convert and overlaps(q.device, head_dim) and fits(k) and fits(v)
    config = config or (hopper_config(head_dim) if overlap else forward_config(head_dim, q.dtype))
    o = torch.empty_like(q, memory_format=torch.contiguous_format)
    log_rest = q.new_empty((num_tokens, num_heads), dtype=torch.float32)
    rows, tiles, stops = aux_shapes(num_tokens, num_heads, num_sequences)
    row_carry, row_tile = q.new_empty(rows, dtype=carry_dtype(q.dtype)), q.new_empty(tiles, dtype=torch.int32)
    # Spare slots are never written, and operator checks compare every element, so they start as zeros.
    if convert and num_tokens > 0:
        block_stop = q.new_empty(stops, dtype=torch.int32)
        v, maxima = half.values(v, cu_k, block_stop)
    else:
        block_stop = q.new_zeros(stops, dtype=torch.int32)
        maxima = half.new_maxima(cu_k, convert)
    if num_tokens == 0:
        return o, log_rest, row_carry, row_tile, block_stop, maxima
    num_slots = num_tokens // config.row_block + num_sequences
    tensors = (
        q, k, v, *descriptors(k, v, tma, overlap), o, None if log_rest_in is None else log_rest_in.contiguous(), log_rest,
        row_carry, row_tile, block_stop, cu_q, cu_k, q_offsets, maxima if convert else None,
    )  # fmt: skip
    programs, *placed = grid(num_slots, num_sequences, num_heads, head_group(k, group, group_bytes))
    numbers = (
        num_tokens, k.shape[0], num_heads, *placed, num_sequences, num_slots, stops[1],
        max_queries or num_tokens, max_keys, *q.stride()[:2], *k.stride()[:2], *v.stride()[:2],
        first_chunk, chunk, scale * LOG2_E, log2_threshold(skip_below),
    )  # fmt: skip
    all_constants = constants(q, config, group, convert, skip_below) | launch(config)
    all_constants |= {"HAS_OFFSET": q_offsets is not None, "HAS_REST": log_rest_in is not None}
    if overlap:
        for name in ("BH", "KEYS", "HALF", "PARTS"):
            del all_constants[name]
        all_constants["STAGES"] = config.num_stages
    kernel = forward_hopper_kernel if overlap else forward_kernel
    launch_kernel(kernel, programs, tensors, numbers, all_constants, follows=convert)
    return o, log_rest, row_carry, row_tile, block_stop, maxima
