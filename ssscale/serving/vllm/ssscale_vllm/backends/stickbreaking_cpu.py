"""Stick-breaking attention over vLLM's paged cache on CPUs, in plain torch.

The cache is that of vLLM's CPU backend, [blocks, K, tokens per block, 2 · H], with k and v of a token side by side. N
query heads, K key/value heads, G = N / K, R queries, S keys of a sequence.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend, CPUAttentionBackendImpl, CPUAttentionMetadata

TILE_ELEMENTS = 1 << 24  # elements of temporaries per block of queries


def break_stick(q: Tensor, k: Tensor, v: Tensor, first: int, scale: float, remainder: bool) -> Tensor:
    """A_ij = β_ij Π_{i<m<j} (1 − β_mj), β = σ(scale · q·k), over strictly earlier keys   (arXiv:2410.17980, Eq. 5)

    i: key, j: query. q: [N, R, H], queries `first`, first + 1, … of a sequence. k, v: [K, S, H]. All float32. With
    `remainder`, the unspent stick goes to the query's own value (Eq. 13). Returns [N, R, H].
    """
    heads, rows, size = q.shape
    keys = first + rows
    k, v = k[:, :keys], v[:, :keys]
    z = (q.reshape(len(k), -1, size) @ k.transpose(1, 2) * scale).view(len(k), -1, rows, keys)  # [K, G, R, S]
    visible = torch.arange(keys) < torch.arange(first, keys)[:, None]
    kept = F.logsigmoid(-z).masked_fill(~visible, 0.0)
    # spent[..., i + 1] is the logarithm of the stick that the keys nearer than i have left; spent[..., 0] that of the
    # unspent stick. The sum excludes key i from the start, because subtracting it again would cancel digits.
    spent = F.pad(kept.flip(-1).cumsum(-1).flip(-1), (0, 1))
    weights = (F.logsigmoid(z) + spent[..., 1:]).exp().masked_fill(~visible, 0.0)
    o = (weights.view(len(k), -1, keys) @ v).view(len(k), -1, rows, size)
    if remainder:
        o = o + spent[..., :1].exp() * v[:, None, first:]
    return o.reshape(heads, rows, size)


class StickBreakingImpl(CPUAttentionBackendImpl):
    """Stick-breaking for one layer. Raises ValueError for a cache of another dtype than the model's."""

    def __init__(self, *args: Any, remainder: bool, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.remainder = remainder
        refused = {
            "a sliding window": self.sliding_window != -1,
            "ALiBi": self.alibi_slopes is not None,
            f"--kv-cache-dtype {self.kv_cache_dtype}": self.is_fp8_kv_cache,
            "a soft cap of logits": bool(self.logits_soft_cap),
        }
        for name, given in refused.items():
            if given:
                raise ValueError(f"stick-breaking attention cannot be served with {name}")

    def do_kv_cache_update(
        self, layer: torch.nn.Module, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        """Writes k and v of new tokens [T, K, H] to their slots [T]; padding has negative slots."""
        real = slot_mapping >= 0
        count, size = len(slot_mapping), kv_cache.shape[2]
        slots, new = slot_mapping[real], torch.cat((key[:count], value[:count]), -1)[real]
        kv_cache[slots // size, :, slots % size] = new.to(kv_cache.dtype)

    def forward(
        self,
        layer: torch.nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: CPUAttentionMetadata | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """Writes the output [T, N, H] for queries [T, N, H], whose keys are in the cache already."""
        assert output_scale is None, "vLLM fuses output quantization only where a backend offers it"
        assert output_block_scale is None
        if attn_metadata is None:  # vLLM warms up
            return output
        starts, lengths = attn_metadata.query_start_loc.tolist(), attn_metadata.seq_lens.tolist()
        size = kv_cache.shape[2]
        for row, (first, last, length) in enumerate(zip(starts[:-1], starts[1:], lengths, strict=True)):
            if last == first:
                continue
            blocks = attn_metadata.block_table[row, : -(-length // size)].long()
            kv = kv_cache[blocks].transpose(0, 1).flatten(1, 2)[:, :length].float()  # [K, S, 2H]
            k, v = kv.split(self.head_size, -1)
            queries = query[first:last].transpose(0, 1).float()
            past, rows = length - (last - first), max(1, TILE_ELEMENTS // (self.num_heads * length))
            for i in range(0, last - first, rows):
                tile = break_stick(queries[:, i : i + rows], k, v, past + i, self.scale, self.remainder)
                output[first + i : first + i + tile.shape[1]] = tile.transpose(0, 1).to(output.dtype)
        return output


class StickBreakingBackend(CPUAttentionBackend):
    """vLLM's CPU backend with another computation, and a cache in plain order."""

    @staticmethod
    def get_name() -> str:
        return "SSSCALE_STICKBREAKING"

    @staticmethod
    def get_impl_cls() -> type[StickBreakingImpl]:
        return StickBreakingImpl

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return False

    @classmethod
    def supports_non_causal(cls) -> bool:
        return False
