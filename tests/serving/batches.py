"""Batches for the attention backend, and its calls in the order in which vLLM makes them."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

HEADS, KV_HEADS, SIZE = 4, 2, 8
# Size of the cache's blocks; tokens in the cache and new tokens of each sequence.
BATCHES = {
    "decode": (16, [20, 0, 47, 16], [1, 1, 1, 1]),
    "chunks": (32, [0, 30, 33, 5], [9, 40, 1, 0]),
    "odd blocks": (48, [60, 3], [2, 50]),
}
LAYOUTS = {"tokens first": (0, 2, 1, 3), "heads first": (0, 1, 2, 3)}  # orders of the cache in memory


class Batch:
    """Random sequences: queries of the new tokens [R, N, H]; keys and values of all tokens [S, K, H]."""

    def __init__(self, sizes: tuple[int, list[int], list[int]], dtype: torch.dtype = torch.float32) -> None:
        self.block_size, self.cached, self.new = sizes
        self.dtype = dtype
        generator = torch.Generator().manual_seed(0)
        shapes = [((n, HEADS), (n + c, KV_HEADS), (n + c, KV_HEADS)) for c, n in zip(self.cached, self.new)]
        self.sequences = [
            tuple(torch.randn(*s, SIZE, generator=generator).to(dtype) for s in shape) for shape in shapes
        ]
        used = [-(-len(k) // self.block_size) for _, k, _ in self.sequences]
        order = torch.randperm(sum(used) + 2, generator=generator).tolist()
        self.num_blocks = len(order)
        self.table = torch.full((len(used), max(used) + 1), 2**30, dtype=torch.int32)  # no block at all
        for row, count in enumerate(used):
            self.table[row, :count] = torch.tensor([order.pop() for _ in range(count)])

    def slots(self, row: int, first: int, last: int) -> Tensor:
        position = torch.arange(first, last)
        return self.table[row, position // self.block_size].long() * self.block_size + position % self.block_size


def prepare(
    batch: Batch, layout: str, scale: float, remainder: bool, write: Callable[..., None] | None = None
) -> tuple[Any, Any, Tensor, Tensor]:
    """Fills a cache in two passes. Returns vLLM's metadata, the layer's implementation, the cache and padded queries.

    write: replaces that of the device.
    """
    from ssscale_vllm.backends import stickbreaking
    from vllm.v1.attention.backend import CommonAttentionMetadata

    order = LAYOUTS[layout]
    shape = (batch.num_blocks, KV_HEADS, batch.block_size, 2 * SIZE)
    # Both orders are their own inverse.
    cache = torch.full([shape[axis] for axis in order], torch.nan, dtype=batch.dtype).permute(order)
    impl = stickbreaking.StickBreakingBackend.get_impl_cls()(
        HEADS, SIZE, scale, KV_HEADS, remainder=remainder, skip_below=0.0
    )
    one = torch.ones(())
    layer = SimpleNamespace(_k_scale=one, _v_scale=one)
    for cached in (True, False):
        keys, values, slots = (
            [torch.randn(2, KV_HEADS, SIZE, dtype=batch.dtype)],
            [torch.randn(2, KV_HEADS, SIZE, dtype=batch.dtype)],
            [torch.tensor([-1, -1])],
        )
        for row, (_, k, v) in enumerate(batch.sequences):
            first, last = (0, batch.cached[row]) if cached else (batch.cached[row], len(k))
            keys.insert(0, k[first:last])
            values.insert(0, v[first:last])
            slots.insert(0, batch.slots(row, first, last))
        new = [torch.cat(x) for x in (keys, values)]
        if write is None:
            impl.do_kv_cache_update(layer, *new, cache, torch.cat(slots))
        else:
            write(layer, *new, *impl._halves(cache), torch.cat(slots))
    starts = torch.tensor([0, *batch.new]).cumsum(0).int()
    lengths = torch.tensor([len(k) for _, k, _ in batch.sequences], dtype=torch.int32)
    common = CommonAttentionMetadata(
        query_start_loc=starts,
        query_start_loc_cpu=starts,
        seq_lens=lengths,
        num_reqs=len(lengths),
        num_actual_tokens=int(starts[-1]),
        max_query_len=max(batch.new),
        max_seq_len=int(lengths.max()) + 100,  # vLLM promises an upper bound only
        block_table_tensor=batch.table,
        slot_mapping=torch.cat(slots),
    )
    q = torch.cat([q for q, _, _ in batch.sequences])
    return common, impl, cache, torch.cat((q, torch.full((3, HEADS, SIZE), torch.nan, dtype=q.dtype)))


def build(common: Any, capture: bool = False) -> Any:
    """Returns the backend's metadata, as vLLM has it built. The longest text has 5,000 tokens."""
    from ssscale_vllm.backends.stickbreaking import StickBreakingBackend

    config = SimpleNamespace(model_config=SimpleNamespace(max_model_len=5000))
    builder = StickBreakingBackend.get_builder_cls()(None, [], config, torch.device("cpu"))
    return builder.build_for_cudagraph_capture(common) if capture else builder.build(0, common)


def run(batch: Batch, layout: str, scale: float, remainder: bool, write: Callable[..., None] | None = None) -> Tensor:
    """Returns the output for the new tokens."""
    common, impl, cache, q = prepare(batch, layout, scale, remainder, write)
    output = torch.full_like(q, torch.nan)
    impl.forward(None, q, None, None, cache, build(common), output)
    return output[: sum(batch.new)]
