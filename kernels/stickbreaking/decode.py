"""Decoding: attention of one or a few new tokens per sequence to its cache, split over the keys.

Each split starts with a whole stick, stops when its rows have spent it, and returns (o, log rest). The merge goes
through the splits from the nearest to the farthest and scales each by what the nearer ones left. All query heads of a
key head share one tile, so K and V are read once.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import blocks, tile
from .forward import LOG2_E, fullest_stick, initial_state, parts, walk_rows, walk_tiles
from .settings import COUNTS, Config, last_contiguous, launch, log2_threshold

# Enough programs to fill 132 multiprocessors eight times. A split of fewer than MIN_KEYS keys is not worth its merge.
TARGET_PROGRAMS = 1056
MIN_KEYS = 256
CHUNK = tl.constexpr(4)  # tiles between two tests whether the sticks are spent


def split_config(rows: int, head_dim: int, dtype: torch.dtype) -> Config:
    """Returns launch settings for `rows` queries × heads per key head.

    A warp has 16 rows: warps that share rows would also share their keys. Products of 32 rows, and all of float32 below 64,
    need more registers than those of 64, the fewest of Hopper's asynchronous ones.
    """
    if dtype == torch.float32:
        rows = max(64, triton.next_power_of_2(rows))
        return Config(rows, 32, rows // 16, 1)
    rows = 16 if rows <= 16 else max(64, triton.next_power_of_2(rows))
    # Operands of one warp with 64 keys of 128 dims would not fit the registers.
    return Config(rows, 32 if rows == 16 and head_dim > 64 else 64, rows // 16, 3)


@triton.jit(do_not_specialize=COUNTS)
def split_kernel(
    q_ptr, k_ptr, v_ptr, o_ptr, rest_ptr, cu_q_ptr, cu_k_ptr, offset_ptr,
    num_tokens, num_keys_total, num_heads, sq_t, sq_n, sk_t, sk_n, sv_t, sv_n, logit_scale, threshold,
    H: tl.constexpr, BH: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, KV_GROUP: tl.constexpr,
    HAS_OFFSET: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    split = tl.program_id(0)
    num_splits = tl.num_programs(0)
    kv_head = tl.program_id(1)
    sequence = tl.program_id(2)
    q_start, q_len, k_start, k_len, offset = blocks.lengths(
        cu_q_ptr, cu_k_ptr, offset_ptr, sequence, num_tokens, num_keys_total, HAS_OFFSET
    )
    local = tl.arange(0, ROWS)
    row = local // KV_GROUP
    head = kv_head * KV_GROUP + local % KV_GROUP
    dims = tl.arange(0, BH)
    row_ok = row < q_len
    token = (q_start + row).to(tl.int64)
    q = blocks.load_rows(q_ptr, token, sq_t, head[:, None], sq_n, row_ok, dims, H)
    source = (k_ptr, v_ptr, None, None, sk_t, sk_n, sv_t, sv_n, k_start, kv_head)
    seen = tl.cdiv(tl.minimum(tl.maximum(offset + q_len - 1, 0), k_len), KEYS)
    per_split = tl.cdiv(seen, num_splits)
    last = tl.maximum(seen - split * per_split, 0)
    first = tl.maximum(last - per_split, 0)
    whole = tl.maximum(tl.minimum(tl.minimum(tl.maximum(offset, 0), k_len) // KEYS, last), first)
    entering, position = tl.where(row_ok, 0.0, -1e30), tl.minimum(offset + row, k_len)
    walk = (entering, q, source, position, whole, last, first, k_len, logit_scale, threshold, CHUNK, CHUNK)
    out = (split.to(tl.int64) * num_tokens + token) * num_heads + head
    results = (o_ptr + out[:, None] * H + dims[None, :], rest_ptr + out, row_ok)
    state, _stop, exact_from, needed = walk_rows(*walk, ROWS, KEYS, H, BH, False, PARTS, False)
    _save(state, *results, dims, H)
    if needed < exact_from:
        state = _walk_exactly(
            entering, q, source, position, last, first, k_len, logit_scale, threshold, ROWS, KEYS, H, BH, PARTS
        )
        _save(state, *results, dims, H)


@triton.jit
def _walk_exactly(
    entering, q, source, position, seen, end, num_keys, logit_scale, threshold,
    ROWS: tl.constexpr, KEYS: tl.constexpr, H: tl.constexpr, BH: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Walks the tiles seen − 1 to `end` with the exact algebra, until the sticks are spent. Returns the state."""
    state = initial_state(entering, ROWS, BH)
    t = seen - 1
    fullest = tl.max(entering, 0).to(tl.float32)
    while (t >= end) & (fullest >= threshold):
        count = tl.minimum(t + 1 - end, CHUNK)
        state = walk_tiles(
            state, q, source, t, count, position, num_keys, logit_scale, tl.maximum(threshold, tile.DEAD),
            True, True, ROWS, KEYS, H, BH, False, PARTS, False,
        )  # fmt: skip
        t -= count
        fullest = fullest_stick(state[1], state[4], True, 0.0)
    return state


@triton.jit
def _save(state, o_rows, rest_rows, row_ok, dims, H: tl.constexpr):
    tl.store(o_rows, state[0], mask=row_ok[:, None] & (dims < H)[None, :])
    tl.store(rest_rows, tl.max(state[1], 1), mask=row_ok)


@triton.jit
def merge_kernel(
    part_ptr, part_rest_ptr, log_rest_in_ptr, o_ptr, log_rest_ptr, num_rows, num_splits,
    H: tl.constexpr, BH: tl.constexpr, HAS_REST: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    dims = tl.arange(0, BH)
    rest = tl.zeros([], tl.float32)
    if HAS_REST:
        rest = tl.load(log_rest_in_ptr + row).to(tl.float32) * tile.LOG2_E
    acc = tl.zeros([BH], tl.float32)
    for _ in range(num_splits):
        acc += tl.exp2(rest) * tl.load(part_ptr + row * H + dims, mask=dims < H, other=0.0)
        rest += tl.load(part_rest_ptr + row)
        row += num_rows
    row -= tl.full([], 1, tl.int64) * num_rows * num_splits
    tl.store(o_ptr + row * H + dims, acc.to(o_ptr.dtype.element_ty), mask=dims < H)
    tl.store(log_rest_ptr + row, rest * tile.LN_2)


def decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_q: Tensor,
    cu_k: Tensor,
    q_offsets: Tensor | None,
    log_rest_in: Tensor | None,
    max_queries: int,
    max_keys: int,
    scale: float,
    skip_below: float,
    num_splits: int | None = None,
    config: Config | None = None,
) -> tuple[Tensor, Tensor]:
    q, k, v = last_contiguous(q), last_contiguous(k), last_contiguous(v)
    num_tokens, num_heads, head_dim = q.shape
    num_kv_heads = k.shape[1]
    group = num_heads // num_kv_heads
    num_sequences = cu_q.shape[0] - 1
    config = config or split_config(max_queries * group, head_dim, q.dtype)
    o = torch.empty((num_tokens, num_heads, head_dim), dtype=q.dtype, device=q.device)
    log_rest = torch.empty((num_tokens, num_heads), dtype=torch.float32, device=q.device)
    if num_tokens == 0:
        return o, log_rest
    if num_splits is None:
        wanted = triton.cdiv(TARGET_PROGRAMS, num_kv_heads * num_sequences)
        num_splits = max(1, min(wanted, triton.cdiv(max_keys, MIN_KEYS)))
    part = torch.empty((num_splits, num_tokens, num_heads, head_dim), dtype=torch.float32, device=q.device)
    part_rest = torch.empty((num_splits, num_tokens, num_heads), dtype=torch.float32, device=q.device)
    padded = max(16, triton.next_power_of_2(head_dim))
    split_kernel[(num_splits, num_kv_heads, num_sequences)](
        q, k, v, part, part_rest, cu_q, cu_k, q_offsets,
        num_tokens, k.shape[0], num_heads, q.stride(0), q.stride(1), k.stride(0), k.stride(1), v.stride(0), v.stride(1),
        scale * LOG2_E, log2_threshold(skip_below),
        H=head_dim, BH=padded, ROWS=config.row_block, KEYS=config.key_block, KV_GROUP=group,
        HAS_OFFSET=q_offsets is not None, PARTS=parts(q, False),
        **launch(config),
    )  # fmt: skip
    merge_kernel[(num_tokens * num_heads,)](
        part, part_rest, None if log_rest_in is None else log_rest_in.contiguous(), o, log_rest, num_tokens * num_heads,
        num_splits,
        H=head_dim, BH=padded, HAS_REST=log_rest_in is not None, num_warps=1,
    )  # fmt: skip
    return o, log_rest
