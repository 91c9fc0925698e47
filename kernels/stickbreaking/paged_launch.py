"""Launches the kernels of paged_kernels.py.

Grids depend on shapes and upper bounds only, never on values on the GPU.
"""

from typing import NamedTuple

import torch
import triton
from torch import Tensor

from . import decode
from .forward import LOG2_E, forward_config
from .launching import starts_early
from .paged_kernels import merge_kernel, prefill_kernel, split_kernel
from .settings import GROUP_BYTES, Config, grid, last_contiguous, launch, log2_threshold

MULTIPROCESSORS = 132
# Splits that the merge loads at once, and its warps.
MERGED = {8: 1, 32: 4, 128: 4}
# Rows of split_kernel: up to the last of these queries × heads per key head, the keys of a sequence are split.
SPLIT_ROWS = (16, 64)
# Tiles between two tests for the exit: the first time, and at most. Prefill takes longer chunks, as training does.
FIRST_CHUNK, SPLIT_CHUNK, PREFILL_CHUNK = 2, 16, 64


class Form(NamedTuple):
    """How decoding runs, apart from tiles and grid. The benchmark compares other forms."""

    first_chunk: int = FIRST_CHUNK
    early: bool = True  # the merge starts while splits still run, on GPUs that can do this


USUAL = Form()


def split_rows(max_seqlen_q: int, group: int) -> int:
    """Returns the rows of split_kernel, or 0 if no sequence is split. A query takes `group` rows.

    Products of 32 rows need more registers than those of 64, the fewest of Hopper's asynchronous ones.
    """
    # In batches that have longer sequences as well, those of few rows are split.
    needed = max_seqlen_q * group if max_seqlen_q * group <= SPLIT_ROWS[-1] else group
    return next((rows for rows in SPLIT_ROWS if rows >= needed), 0)


def _strides(cache: Tensor, block_table: Tensor) -> dict[str, int]:
    return {"sc_n": cache.stride(2), "st_b": block_table.stride(0)}


def paged(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    cu_seqlens_q: Tensor,
    seq_lens: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    scale: float,
    skip_below: float,
    remainder: bool,
    num_splits: int | None = None,
    prefill: Config | None = None,
    split: Config | None = None,
    out: Tensor | None = None,
    form: Form = USUAL,
) -> tuple[Tensor, Tensor]:
    """Runs the kernels; arguments and results are those of `paged.paged_stickbreaking`, the defaults filled in.

    Short sequences go to split_kernel and the others to a prefill kernel, which each program decides by itself: both are
    launched unless max_seqlen_q excludes one of them. num_splits, prefill, split, form: replace the chosen settings.
    out: contiguous, for o.
    """
    q, block_table = last_contiguous(q), last_contiguous(block_table)
    num_tokens, num_heads, head_dim = q.shape
    o = torch.empty((num_tokens, num_heads, head_dim), dtype=q.dtype, device=q.device) if out is None else out
    log_rest = torch.empty((num_tokens, num_heads), dtype=torch.float32, device=q.device)
    if 0 in (num_tokens, *block_table.shape):
        return o, log_rest
    group = num_heads // k_cache.shape[2]
    rows = split_rows(max_seqlen_q, group)
    split_queries = rows // group
    inputs = (q, k_cache, v_cache, block_table, cu_seqlens_q, seq_lens)
    settings = (scale * LOG2_E, log2_threshold(skip_below), remainder, split_queries)
    if max_seqlen_q > split_queries:
        _prefill(inputs, o, log_rest, *settings, prefill or forward_config(head_dim, q.dtype), max_seqlen_k)
    if split_queries:
        split = split or split_config(rows, head_dim, q.dtype)
        num_splits = num_splits or default_splits(max_seqlen_k, k_cache.shape[2] * seq_lens.shape[0], split)
        _split(inputs, o, log_rest, *settings, split, num_splits, min(max_seqlen_q, split_queries), form)
    return o, log_rest


def split_config(rows: int, head_dim: int, dtype: torch.dtype) -> Config:
    """Returns launch settings of split_kernel: those of contiguous decoding, but for a shorter pipeline where it was faster."""
    config = decode.split_config(rows, head_dim, dtype)
    return config._replace(num_stages=2) if config[:3] == (16, 64, 1) else config


def default_splits(max_seqlen_k: int, num_heads: int, config: Config) -> int:
    """Returns the number of splits, at most one per tile. num_heads: key heads of all sequences."""
    # More splits than run at once would wait for others to end, and then start with an empty pipeline. Of 16 rows, six would
    # run at once on a multiprocessor. Three reach the same bandwidth, and leave less to merge.
    wanted = triton.cdiv(MULTIPROCESSORS * (3 if config.row_block <= 16 else 2), num_heads)
    return max(1, min(wanted, triton.cdiv(max_seqlen_k, config.key_block)))


def shape_constants(q: Tensor, k_cache: Tensor, v_cache: Tensor, config: Config) -> dict[str, int | bool]:
    """Returns the compile-time constants that all kernels share."""
    head_dim = q.shape[2]
    return {
        "H": head_dim,
        "BH": max(16, triton.next_power_of_2(head_dim)),
        "ROWS": config.row_block,
        "KEYS": config.key_block,
        "BS": k_cache.shape[1],
        "BLOCK": k_cache.stride(0),
        "SLOT": k_cache.stride(1),
        "BESIDE": v_cache.data_ptr() - k_cache.data_ptr() == head_dim * q.element_size(),  # as in vLLM
        "KV_GROUP": q.shape[1] // k_cache.shape[2],
    }


def _prefill(
    inputs: tuple[Tensor, ...],
    o: Tensor,
    log_rest: Tensor,
    logit_scale: float,
    threshold: float,
    remainder: bool,
    split_queries: int,
    config: Config,
    max_keys: int,
) -> None:
    q, k_cache, v_cache, block_table, cu_q, seq_lens = inputs
    (num_tokens, num_heads, head_dim), num_sequences = q.shape, seq_lens.shape[0]
    num_slots = num_tokens // config.row_block + num_sequences
    # As `forward.head_group`: the heads side by side in the grid read about as much as the L2 cache holds.
    key_bytes = 2 * max(1, max_keys) * head_dim * q.element_size()
    heads = num_heads // k_cache.shape[2] * max(1, GROUP_BYTES // key_bytes)
    programs, *placed = grid(num_slots, num_sequences, num_heads, heads)
    prefill_kernel[programs](
        q, k_cache, v_cache, block_table, o, log_rest, cu_q, seq_lens,
        num_tokens, num_heads, num_sequences, num_slots, block_table.shape[1], *placed, split_queries,
        FIRST_CHUNK, PREFILL_CHUNK, q.stride(0), q.stride(1),
        logit_scale=logit_scale, threshold=threshold, REMAINDER=remainder,
        **_strides(k_cache, block_table), **shape_constants(q, k_cache, v_cache, config), **launch(config),
    )  # fmt: skip


def _split(
    inputs: tuple[Tensor, ...],
    o: Tensor,
    log_rest: Tensor,
    logit_scale: float,
    threshold: float,
    remainder: bool,
    split_queries: int,
    config: Config,
    num_splits: int,
    max_queries: int,
    form: Form,
) -> None:
    q, k_cache, v_cache, block_table, cu_q, seq_lens = inputs
    (num_tokens, num_heads, head_dim), num_sequences = q.shape, seq_lens.shape[0]
    num_kv_heads = k_cache.shape[2]
    whole = num_splits == 1
    early = form.early and not whole and starts_early(q.device)
    part = part_rest = None
    if not whole:
        shape = (num_splits, num_sequences, num_kv_heads, config.row_block)
        part = torch.empty((*shape, head_dim), dtype=torch.float32, device=q.device)
        part_rest = torch.empty(shape, dtype=torch.float32, device=q.device)
    constants, strides = shape_constants(q, k_cache, v_cache, config), _strides(k_cache, block_table)
    split_kernel[(num_splits, num_kv_heads, num_sequences)](
        q, k_cache, v_cache, block_table, part, part_rest, o, log_rest, cu_q, seq_lens,
        num_tokens, num_kv_heads, num_sequences, block_table.shape[1], split_queries, form.first_chunk, SPLIT_CHUNK,
        q.stride(0), q.stride(1), logit_scale=logit_scale, threshold=threshold, WHOLE=whole,
        EARLY=early, REMAINDER=whole and remainder, **strides, **constants, **launch(config),
    )  # fmt: skip
    if whole:
        return
    merged = next((n for n in MERGED if n >= num_splits), max(MERGED))
    merge_kernel[(num_heads, max_queries, num_sequences)](
        part, part_rest, v_cache, block_table, o, log_rest, cu_q, seq_lens,
        num_tokens, num_heads, num_sequences, num_splits, block_table.shape[1], split_queries,
        **strides, **{name: constants[name] for name in ("H", "BH", "ROWS", "BS", "BLOCK", "SLOT", "KV_GROUP")},
        KEYS=config.key_block, REMAINDER=remainder, MERGED=merged, EARLY=early, num_warps=MERGED[merged],
        **({"launch_pdl": True} if early else {}),
    )  # fmt: skip
