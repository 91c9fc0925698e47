"""Launch settings of the kernels, and what all launches share."""

import math
from typing import NamedTuple

from torch import Tensor

# Counts vary between batches. Triton must not compile again when one of them is 1 or a multiple of 16.
COUNTS = (
    "num_tokens", "num_keys_total", "num_heads", "num_kv_heads", "heads_beside", "slots_each",
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


def log2_threshold(skip_below: float) -> float:
    return math.log2(skip_below) if skip_below > 0 else -1e38


def launch(config: Config) -> dict[str, int | None]:
    return {"num_warps": config.num_warps, "num_stages": config.num_stages, "maxnreg": config.max_registers}


def head_group(walked: Tensor, heads_each: int, group_bytes: int = GROUP_BYTES) -> int:
    """Returns how many heads run side by side: as many as read at most `group_bytes` of two tensors like `walked`."""
    tokens, _, head_dim = walked.shape
    return heads_each * max(1, group_bytes // (2 * tokens * head_dim * walked.element_size()))


class Grid(NamedTuple):
    """Programs for the blocks of all heads, and what `blocks.assign` needs to find theirs."""

    programs: tuple[int, int]
    heads_beside: int
    slots_each: int


def grid(num_slots: int, num_sequences: int, num_heads: int, heads_beside: int) -> Grid:
    """heads_beside: as from `head_group`. Programs beyond the last slot or head fill up sequences and groups of heads."""
    heads_beside, slots_each = min(heads_beside, num_heads), -(-num_slots // num_sequences)
    return Grid((slots_each * num_sequences * heads_beside, -(-num_heads // heads_beside)), heads_beside, slots_each)


def last_contiguous(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()
