"""The forward kernel for float32: visits key tiles from the nearest to the farthest, until every stick of a block is spent.

bf16 and fp16 have kernels of their own (sixteen/). Decoding and the paged cache use `walk_tiles` and the settings below in
every dtype.
"""

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import tile
from .kept import aux_shapes, carry_dtype

# Counts vary between batches. Triton must not compile again when one of them is 1 or a multiple of 16.
COUNTS = (
    "num_tokens", "num_keys_total", "num_heads", "num_kv_heads", "head_group",
    "num_sequences", "num_slots", "num_stop_slots", "num_key_slots", "num_tiles", "first_slot",
    "last_slot", "max_queries", "max_keys", "first_chunk", "chunk",
)  # fmt: skip


# About the size of an H200's L2 cache.
GROUP_BYTES = 48 << 20


class Config(NamedTuple):
    """Launch settings of one kernel.

    Forward and backward share key_block, because backward takes over carries at its multiples.
    """

    row_block: int
    key_block: int
    num_warps: int
    num_stages: int
    max_registers: int | None = None


def forward_config(head_dim: int) -> Config:
    # In backward, wider tiles exceed the registers.
    return Config(64, 64 if head_dim <= 32 else 32, 4, 1)


@triton.jit
def walk_tiles(
    acc, carry, row_carry, row_tile, q, k_ptr, v_ptr, k_offsets, v_offsets, k_step, v_step, first, count, position, num_keys,
    logit_scale, floor, nearer, dims,
    ROWS: tl.constexpr, BN: tl.constexpr, H: tl.constexpr, BH: tl.constexpr, MASKED: tl.constexpr, PARTS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Processes `count` tiles from tile `first` on, toward lower indices."""
    column_key = tile.key_of_column(BN)
    three_passes: tl.constexpr = PRECISION == "tf32x3"  # hoisted values would fill the registers
    for step in tl.range(count, num_stages=1 if MASKED else None, disable_licm=three_passes):
        t = first - step
        alive = carry > floor
        row_carry = tl.where(alive, carry, row_carry)
        row_tile = tl.where(alive, t, row_tile)
        k_tile = k_ptr + t * k_step + k_offsets
        v_tile = v_ptr + t * v_step + v_offsets
        if MASKED:
            inside = (t * BN + column_key < num_keys)[:, None] & (dims < H)[None, :]
            k = tl.load(k_tile, mask=inside, other=0.0)
            v = tl.load(v_tile, mask=inside, other=0.0)
        elif H == BH:
            k = tl.load(k_tile)
            v = tl.load(v_tile)
        else:
            k = tl.load(k_tile, mask=(dims < H)[None, :], other=0.0)
            v = tl.load(v_tile, mask=(dims < H)[None, :], other=0.0)
        z = tl.dot(q, tl.trans(k), input_precision=PRECISION) * logit_scale
        u0, u1, u2, u3, _, capped, spent = tile.spend(z, position - t * BN, MASKED, ROWS, BN)
        rest = carry.to(tl.float32)[:, None] - tile.spent_nearer(spent, nearer, PRECISION) - capped
        a0, a1, a2, a3 = tile.weigh(u0, u1, u2, u3, rest)
        carry -= tl.sum(spent, 1)
        weights = tile.whole(a0, a1, a2, a3, ROWS, BN)
        acc = tile.multiply(weights, v, acc, False, PARTS, PRECISION)
    return acc, carry, row_carry, row_tile


@triton.jit(do_not_specialize=COUNTS)
def forward_kernel(
    q_ptr, k_ptr, v_ptr, o_ptr, log_rest_in_ptr, log_rest_ptr, row_carry_ptr, row_tile_ptr, block_stop_ptr, cu_q_ptr,
    cu_k_ptr, offset_ptr,
    num_tokens, num_keys_total, num_heads, head_group, num_sequences, num_slots, num_stop_slots, max_queries, max_keys,
    sq_t, sq_n, sk_t, sk_n, sv_t, sv_n,
    first_chunk, chunk, logit_scale, threshold,
    H: tl.constexpr, BH: tl.constexpr, ROWS: tl.constexpr, BN: tl.constexpr, KV_GROUP: tl.constexpr,
    HAS_OFFSET: tl.constexpr, HAS_REST: tl.constexpr, NEARER: tl.constexpr, NEARER_PARTS: tl.constexpr,
    PARTS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    places = tl.cdiv(num_slots, num_sequences) * num_sequences
    head, place = tile.assign(tl.program_id(0), num_heads, head_group, places)
    slot = tile.slot_at(place, num_slots, num_sequences, True)
    if slot >= num_slots:
        return
    sequence, block = tile.locate(cu_q_ptr, slot, num_sequences, ROWS)
    q_start, q_len = tile.bounds(cu_q_ptr, sequence, num_tokens)
    k_start, k_len = tile.bounds(cu_k_ptr, sequence, num_keys_total)
    if (block < 0) | (block * ROWS >= q_len):
        return
    offset = 0
    if HAS_OFFSET:
        offset = tl.load(offset_ptr + sequence).to(tl.int32)

    row = block * ROWS + tl.arange(0, ROWS)
    dims = tl.arange(0, BH)
    row_ok = row < q_len
    in_rows = row_ok[:, None] & (dims < H)[None, :]
    token = (q_start + row).to(tl.int64)
    q = tl.load(q_ptr + token[:, None] * sq_t + head * sq_n + dims[None, :], mask=in_rows, other=0.0)
    kv_head = head // KV_GROUP
    column_key = tile.key_of_column(BN)
    k_ptr += k_start.to(tl.int64) * sk_t + kv_head * sk_n
    v_ptr += k_start.to(tl.int64) * sv_t + kv_head * sv_n
    k_offsets = column_key[:, None] * sk_t + dims[None, :]
    v_offsets = column_key[:, None] * sv_t + dims[None, :]
    k_step = tl.full([], BN, tl.int64) * sk_t
    v_step = tl.full([], BN, tl.int64) * sv_t

    # Row r attends to the keys below its position. Tiles that all rows attend to as a whole need no mask.
    position = tl.minimum(offset + row, k_len)
    end = tl.cdiv(tl.minimum(tl.maximum(offset + tl.minimum(block * ROWS + ROWS, q_len) - 1, 0), k_len), BN)
    unmasked = tl.minimum(tl.maximum(offset + block * ROWS, 0), k_len) // BN

    carry = tl.zeros([ROWS], tl.float32)
    if HAS_REST:
        carry = tl.load(log_rest_in_ptr + token * num_heads + head, mask=row_ok, other=0.0).to(tl.float32) * tile.LOG2_E
    # Rows beyond the sequence must not delay the exit.
    carry = tl.where(row_ok, carry, -1e30).to(row_carry_ptr.dtype.element_ty)
    # The carry of a row is saved where its weights end. Backward continues from there, so that its subtractions stay
    # accurate.
    floor = tl.maximum(threshold, tile.DEAD)
    row_carry = carry
    row_tile = tl.full([ROWS], tile.NEVER, tl.int32)
    acc = tl.zeros([ROWS, BH], tl.float32)
    nearer = tile.triangle(BN, True, NEARER_PARTS, NEARER)

    acc, carry, row_carry, row_tile = walk_tiles(
        acc, carry, row_carry, row_tile, q, k_ptr, v_ptr, k_offsets, v_offsets, k_step, v_step, end - 1, end - unmasked,
        position, k_len, logit_scale,
        floor, nearer, dims, ROWS, BN, H, BH, True, PARTS, PRECISION,
    )  # fmt: skip
    # The exit is tested once per chunk, because Triton does not pipeline a loop with a test in every iteration. The
    # next chunk is as long as the fullest stick lasts at the rate of the last chunk.
    t = unmasked - 1
    fullest = tl.max(carry, 0).to(tl.float32)
    ahead = first_chunk
    while (t >= 0) & (fullest >= threshold):
        count = tl.minimum(t + 1, ahead)
        acc, carry, row_carry, row_tile = walk_tiles(
            acc, carry, row_carry, row_tile, q, k_ptr, v_ptr, k_offsets, v_offsets, k_step, v_step, t, count, position,
            k_len, logit_scale,
            floor, nearer, dims, ROWS, BN, H, BH, False, PARTS, PRECISION,
        )  # fmt: skip
        t -= count
        left = tl.max(carry, 0).to(tl.float32)
        lasts = (left - threshold) * count / tl.maximum(fullest - left, 1e-6)
        ahead = tl.minimum(lasts, chunk - 1.0).to(tl.int32) + 1
        fullest = left

    # If a sequence exceeds the given maxima, backward's scratch is too small. The result shows this as NaN.
    acc = tl.where((k_len > max_keys) | (q_len > max_queries), float("nan"), acc)
    tl.store(
        o_ptr + (token[:, None] * num_heads + head) * H + dims[None, :], acc.to(o_ptr.dtype.element_ty), mask=in_rows
    )
    tl.store(log_rest_ptr + token * num_heads + head, (carry * tile.LN_2).to(tl.float32), mask=row_ok)
    saved = head.to(tl.int64) * num_tokens + token
    tl.store(row_carry_ptr + saved, row_carry, mask=row_ok)
    tl.store(row_tile_ptr + saved, row_tile, mask=row_ok)
    # In exact mode, the gradient of log_rest reaches every key.
    stop = tl.where(threshold < tile.DEAD, t + 1, tl.min(row_tile, 0))
    granule = block * (ROWS // tile.STOP_ROWS) + tl.arange(0, ROWS // tile.STOP_ROWS)
    first_granule = tl.load(cu_q_ptr + sequence).to(tl.int32) // tile.STOP_ROWS + sequence
    stop_ptrs = block_stop_ptr + head * num_stop_slots + first_granule + granule
    tl.store(stop_ptrs, tl.full([ROWS // tile.STOP_ROWS], 0, tl.int32) + stop, mask=granule * tile.STOP_ROWS < q_len)


def log2_threshold(skip_below: float) -> float:
    return math.log2(skip_below) if skip_below > 0 else -1e38


class SumTypes(NamedTuple):
    """Numeric formats of the kernels.

    nearer: dtype of the triangle products over spent sticks, in nearer_parts parts. parts: number of parts of weights in
    products. dot: precision of all products.
    """

    nearer: tl.dtype
    nearer_parts: int
    parts: int
    dot: str


def sum_types(dtype: torch.dtype, key_block: int) -> SumTypes:
    """Returns the formats for inputs of `dtype`.

    fp16 rounds eight times finer than bf16, which suffices for bf16 results. fp16 results need a second part, and so do
    key blocks under 64, because a product must have at least 16 columns.
    """
    if dtype == torch.float32:
        return SumTypes(tl.float32, 2 if key_block < 64 else 1, 1, "tf32x3")
    parts = 2 if dtype == torch.float16 or key_block < 64 else 1
    return SumTypes(tl.float16, parts, 2 if dtype == torch.float16 else 1, "tf32")


def launch(config: Config) -> dict[str, int | None]:
    return {"num_warps": config.num_warps, "num_stages": config.num_stages, "maxnreg": config.max_registers}


def head_group(walked: Tensor, heads_each: int, group_bytes: int = GROUP_BYTES) -> int:
    """Returns how many heads run side by side: as many as read at most `group_bytes` of two tensors like `walked`."""
    tokens, _, head_dim = walked.shape
    return heads_each * max(1, group_bytes // (2 * tokens * head_dim * walked.element_size()))


def last_contiguous(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_q: Tensor,
    cu_k: Tensor,
    q_offsets: Tensor | None,
    log_rest_in: Tensor | None,
    max_keys: int,
    scale: float,
    skip_below: float,
    config: Config | None = None,
    first_chunk: int = 2,
    chunk: int = 16,
    group_bytes: int = GROUP_BYTES,
    max_queries: int | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Runs the forward kernel on float32. Returns o, log_rest, row_carry, row_tile, block_stop and maxima, which are empty
    (see `ops.forward_op`)."""
    assert q.dtype == torch.float32, q.dtype
    q, k, v = last_contiguous(q), last_contiguous(k), last_contiguous(v)
    num_tokens, num_heads, head_dim = q.shape
    num_sequences = cu_q.shape[0] - 1
    config = config or forward_config(head_dim)
    maxima = q.new_empty((0, 4), dtype=torch.int32)
    o = torch.empty((num_tokens, num_heads, head_dim), dtype=q.dtype, device=q.device)
    log_rest = torch.empty((num_tokens, num_heads), dtype=torch.float32, device=q.device)
    rows, tiles, stops = aux_shapes(num_tokens, num_heads, num_sequences)
    row_carry = torch.empty(rows, dtype=carry_dtype(q.dtype), device=q.device)
    row_tile = torch.empty(tiles, dtype=torch.int32, device=q.device)
    # Spare slots are never written, and operator checks compare every element, so they start as zeros.
    block_stop = torch.zeros(stops, dtype=torch.int32, device=q.device)
    if num_tokens == 0:
        return o, log_rest, row_carry, row_tile, block_stop, maxima
    log_rest_in = None if log_rest_in is None else log_rest_in.contiguous()
    sums = sum_types(q.dtype, config.key_block)
    num_slots = num_tokens // config.row_block + num_sequences
    heads = head_group(k, num_heads // k.shape[1], group_bytes)
    forward_kernel[(triton.cdiv(num_slots, num_sequences) * num_sequences * num_heads,)](
        q, k, v, o, log_rest_in, log_rest, row_carry, row_tile, block_stop, cu_q, cu_k, q_offsets,
        num_tokens, k.shape[0], num_heads, heads, num_sequences, num_slots, stops[1], max_queries or num_tokens,
        max_keys, q.stride(0), q.stride(1), k.stride(0), k.stride(1),
        v.stride(0), v.stride(1), first_chunk, chunk, scale * 1.4426950408889634, log2_threshold(skip_below),
        H=head_dim, BH=max(16, triton.next_power_of_2(head_dim)), ROWS=config.row_block, BN=config.key_block,
        KV_GROUP=num_heads // k.shape[1],
        HAS_OFFSET=q_offsets is not None, HAS_REST=log_rest_in is not None,
        NEARER=sums.nearer, NEARER_PARTS=sums.nearer_parts, PARTS=sums.parts, PRECISION=sums.dot, **launch(config),
    )  # fmt: skip
    return o, log_rest, row_carry, row_tile, block_stop, maxima
