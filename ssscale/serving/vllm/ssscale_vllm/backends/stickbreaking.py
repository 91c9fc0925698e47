"""Stick-breaking attention over vLLM's paged cache: the operator of ssscale-kernels as an attention backend.

The operator runs Triton kernels on NVIDIA GPUs and plain torch on CPUs. Nothing is read back from a GPU, and grids follow
from upper bounds, so that a captured CUDA graph serves other batches of its size.

T tokens, N query heads, K key/value heads. The cache of a layer is [blocks, K, tokens per block, 2 · H], in whatever order
in memory vLLM chose, with k and v of a token side by side.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from ssscale_kernels.stickbreaking.interface import MAX_HEAD_DIM
from ssscale_kernels.stickbreaking.paged import paged_stickbreaking
from torch import Tensor
from vllm.config import VllmConfig
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadata,
    AttentionMetadataBuilder,
    AttentionType,
    CommonAttentionMetadata,
)


@dataclass
class StickBreakingMetadata(AttentionMetadata):
    """A batch of B sequences. starts: [B + 1] int32 boundaries of their new tokens. lengths: [B] int32 keys of each.

    max_new, max_length: upper bounds of new tokens and keys per sequence. table: [B, blocks] int32.
    """

    starts: Tensor
    lengths: Tensor
    table: Tensor
    max_new: int
    max_length: int


class StickBreakingMetadataBuilder(AttentionMetadataBuilder[StickBreakingMetadata]):
    """Takes vLLM's own tensors, which live as long as captured graphs do."""

    # max_new chooses the kernels. Graphs of mixed batches would have to hold for every value of it.
    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_BATCH

    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: VllmConfig, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> StickBreakingMetadata:
        batch = common_attn_metadata
        if batch.causal is not True:
            raise ValueError("stick-breaking attention cannot be served without a causal mask")
        return StickBreakingMetadata(
            starts=batch.query_start_loc,
            lengths=batch.seq_lens,
            table=batch.block_table_tensor,
            max_new=batch.max_query_len,
            max_length=batch.max_seq_len,
        )

    def build_for_cudagraph_capture(self, common_attn_metadata: CommonAttentionMetadata) -> StickBreakingMetadata:
        """The number of splits is captured, so it must be that of the longest texts."""
        found = self.build(0, common_attn_metadata)
        found.max_length = self.vllm_config.model_config.max_model_len
        found.lengths.fill_(1)  # as vLLM's Triton backend: the passes before the capture are short
        return found


def write_on_cpu(
    layer: torch.nn.Module, key: Tensor, value: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor
) -> None:
    real = slots >= 0
    place = slots[real] // k_cache.shape[1], slots[real] % k_cache.shape[1]
    k_cache[place], v_cache[place] = key[: len(real)][real], value[: len(real)][real]


def write_on_gpu(
    layer: torch.nn.Module, key: Tensor, value: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor
) -> None:
    from vllm.v1.attention.ops.triton_reshape_and_cache_flash import triton_reshape_and_cache_flash

    # "auto": the cache has the dtype of k and v, and the scales are not read.
    triton_reshape_and_cache_flash(key, value, k_cache, v_cache, slots, "auto", layer._k_scale, layer._v_scale)


class StickBreakingImpl(AttentionImpl[StickBreakingMetadata]):
    """Stick-breaking for one layer. Raises ValueError for what the operator does not compute.

    remainder, skip_below: as in `ssscale_kernels.stickbreaking.paged`.
    """

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        *,
        remainder: bool,
        skip_below: float,
    ) -> None:
        self.num_heads, self.num_kv_heads = num_heads, num_heads if num_kv_heads is None else num_kv_heads
        self.head_size, self.scale, self.kv_cache_dtype = head_size, float(scale), kv_cache_dtype
        self.remainder, self.skip_below = remainder, skip_below
        refused = {
            "a sliding window": sliding_window is not None,
            "ALiBi": alibi_slopes is not None,
            f"--kv-cache-dtype {kv_cache_dtype}": kv_cache_dtype not in ("auto", _name(torch.get_default_dtype())),
            "a soft cap of logits": bool(logits_soft_cap),
            f"attention of type {attn_type}": attn_type != AttentionType.DECODER,
            "a cache that layers share": kv_sharing_target_layer_name is not None,
            f"heads of {head_size} dims, more than {MAX_HEAD_DIM}": head_size > MAX_HEAD_DIM,
        }
        for name, given in refused.items():
            if given:
                raise ValueError(f"stick-breaking attention cannot be served with {name}")

    def do_kv_cache_update(
        self, layer: torch.nn.Module, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        """Writes k and v of new tokens [T, K, H] to their slots [T]; padding has negative slots."""
        write = write_on_cpu if key.device.type == "cpu" else write_on_gpu
        write(layer, key, value, *self._halves(kv_cache), slot_mapping)

    def forward(
        self,
        layer: torch.nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: StickBreakingMetadata | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """Writes the output [T, N, H] for queries [T, N, H], whose keys are in the cache already."""
        assert output_scale is None, "vLLM fuses output quantization only where a backend offers it"
        assert output_block_scale is None
        if attn_metadata is None:  # vLLM warms up, or measures memory
            return output.fill_(0)
        batch = attn_metadata
        # Tokens after the last sequence are padding. The operator skips them.
        paged_stickbreaking(
            query,
            *self._halves(kv_cache),
            batch.table,
            batch.starts,
            batch.lengths,
            self.scale,
            self.skip_below,
            remainder=self.remainder,
            max_seqlen_q=batch.max_new,
            max_seqlen_k=batch.max_length,
            out=output,
        )
        return output

    def _halves(self, kv_cache: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the caches of k and of v, [blocks, tokens per block, K, H]."""
        k_cache, v_cache = kv_cache.transpose(1, 2).split(self.head_size, -1)
        return k_cache, v_cache


class StickBreakingBackend(AttentionBackend):
    """The backend of layers with stick-breaking. It takes blocks of any size, and caches in any order in memory."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16, torch.float32]
    forward_includes_kv_cache_update: bool = False

    @staticmethod
    def get_name() -> str:
        return "SSSCALE_STICKBREAKING"

    @staticmethod
    def get_impl_cls() -> type[StickBreakingImpl]:
        return StickBreakingImpl

    @staticmethod
    def get_builder_cls() -> type[StickBreakingMetadataBuilder]:
        return StickBreakingMetadataBuilder

    @classmethod
    def validate_configuration(cls, *arguments: Any, **options: Any) -> list[str]:
        """vLLM asks this for layers of other mixers only, if --attention-backend names this backend."""
        return ["it computes stick-breaking attention, and layers of that choose it by themselves"]


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
