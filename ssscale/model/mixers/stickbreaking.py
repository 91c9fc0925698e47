"""Stick-breaking attention, arXiv:2410.17980."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, ClassVar

from ssscale.config.registry import MIXERS
from ssscale.errors import UserError
from ssscale.model.mixers.base import Export, Mixer, Sizes

# The functions from `mix_stickbreaking` to `break_stick` run only in exported models. `ssscale.hf.code` copies their source
# into the modeling file, which defines the names imported below.
if TYPE_CHECKING:
    import torch
    import torch.nn.functional as F
    from torch import Tensor

    from ssscale.config.schema import ModelConfig
    from ssscale.hf.modeling_ssscale import Attention as ExportedAttention
    from ssscale.hf.modeling_ssscale import Batch, attend_in_tiles, boundaries, gpu_function, packed
    from ssscale.layout import PackedLayout
    from ssscale.model.decoder import Attention

ROWS, KEYS = 128, 64  # queries and keys per tile in `live_tiles`
HEADS = 4  # `live_tiles` counts only this many heads, to save time
BLOCK = 1024  # queries per pass of `live_tiles`, so that 16,384 tokens need 256 MiB at a time instead of 4 GiB


def mix_stickbreaking(q: Tensor, k: Tensor, v: Tensor, batch: Batch, layer: ExportedAttention) -> Tensor:
    """A_ij = β_ij Π_{i<m<j} (1 − β_mj), β_ij = σ(scale · q_j·k_i)   (arXiv:2410.17980, Eq. 1)

    Query j gives each earlier key i the weight A_ij; m counts the keys between them. The unspent stick, Π_{m<j} (1 −
    β_mj), is the share of the attention weight that no key took. With `remainder` it goes to the query's own value (Eq.
    13).
    """
    # Besides wide heads and mixed dtypes, plain torch runs in two cases. `output_attentions` passes unit vectors as v,
    # whose size is not that of k. And under torch.compile, the values of the batch that packing needs cannot be read.
    if not torch.compiler.is_compiling() and v.shape[-1] == k.shape[-1] <= 128 and q.dtype == k.dtype == v.dtype:
        kernels = gpu_function("ssscale_kernels.stickbreaking", "stickbreaking_attention", q.device)
        if kernels is not None:
            return break_stick_in_kernels(kernels, q, k, v, batch, layer)
    return attend_in_tiles(break_stick, q, k, v, batch, layer, strict=True)


def break_stick_in_kernels(
    kernels: Any, q: Tensor, k: Tensor, v: Tensor, batch: Batch, layer: ExportedAttention
) -> Tensor:
    """Calls `ssscale_kernels.stickbreaking.stickbreaking_attention`. The output is 0 at padding positions."""
    rows, _, new, _ = q.shape
    keys = k.shape[2]
    real = None if batch.real is None else batch.real[:, keys - new :]
    starts_q, starts_k, first = boundaries(batch, rows, new, keys)
    o, log_rest = kernels(
        packed(q, real),
        packed(k, batch.real),
        packed(v, batch.real),
        cu_seqlens_q=starts_q,
        cu_seqlens_k=starts_k,
        max_seqlen_q=new,
        max_seqlen_k=keys,
        q_offsets=first,
        scale=layer.scale,
        skip_below=layer.options["skip_below"],
    )
    if layer.options["remainder"]:
        own = packed(v[:, :, keys - new :], real).repeat_interleave(q.shape[1] // v.shape[1], 1)
        o = o + (log_rest.exp()[..., None] * own).to(o.dtype)
    if real is not None:
        o = o.new_zeros((rows, new, *o.shape[1:])).masked_scatter(real[..., None, None], o)
    return o.unflatten(0, (rows, new)).transpose(1, 2) if real is None else o.transpose(1, 2)


def break_stick(
    q: Tensor, k: Tensor, v: Tensor, visible: Tensor, batch: Batch, layer: ExportedAttention, first: int
) -> Tensor:
    """Returns the output for a block of queries that starts at index `first`."""
    z = q.float() @ k.float().transpose(-1, -2) * layer.scale
    kept = F.logsigmoid(-z).masked_fill(~visible, 0.0)
    # rest[..., i + 1] is the logarithm of the stick that key i finds, after the keys nearer to the query have taken their
    # shares; rest[..., 0] is that of the unspent stick. The sum over the keys from i on, minus key i, would give the same,
    # but would lose digits.
    rest = F.pad(kept.flip(-1).cumsum(-1).flip(-1), (0, 1))
    weights = (F.logsigmoid(z) + rest[..., 1:]).exp().masked_fill(~visible, 0.0)
    o = weights @ v.float()
    if layer.options["remainder"]:
        own = first + batch.past
        o = o + rest[..., :1].exp() * v[:, :, own : own + q.shape[2]].float()
    return o.to(q.dtype)


@MIXERS.register("stickbreaking")
@dataclass(frozen=True)
class StickBreaking(Mixer):
    """A_ij = β_ij Π_{i<m<j} (1 − β_mj), β_ij = sigmoid(q_j·k_i / sqrt(H))   (arXiv:2410.17980, Eq. 1)

    Query j gives each earlier key i the weight A_ij; m counts the keys between them. The unspent stick, Π_{m<j} (1 −
    β_mj), is the share of the attention weight that no key took. With `remainder` it goes to the query's own value: o_j
    += Π_{m<j} (1 − β_mj) v_j (Eq. 13).
    """

    positions_reason = "it takes the nearest keys first, which tells positions apart"
    # completes the error message "model.mixers=[stickbreaking], which"
    no_window = "spends its stick on the nearest keys anyway"
    ulysses = ring = cached = True
    kept_operators = ("stickbreaking",)
    export = Export(mix_stickbreaking, helpers=(break_stick, break_stick_in_kernels))
    exact: ClassVar[Mapping[str, object]] = {"skip_below": 0}
    observes = ("stick_unspent", "stick_live_tiles")

    remainder: bool = False  # the unspent stick goes to the query's own value (Eq. 13)
    skip_below: float = (  # on a GPU, a tile of queries skips all farther keys once each query has less than this
        2.0**-12  # share of its stick left; 0: nothing is skipped
    )

    def check(self, model: ModelConfig) -> None:
        if not 0 <= self.skip_below < 1:
            bound = "0 or more" if self.skip_below < 0 else "less than 1"
            raise UserError(f"model.mixer.{self.name}.skip_below must be {bound}, not {self.skip_below}")

    def flops(self, width: int, keys: float) -> float:
        """As softmax: two products forward and four backward, each of 2 FLOPs per element."""
        return 12.0 * width * keys

    def kept_bytes(self, sizes: Sizes) -> float:
        """The logarithm of the unspent stick, float32 per head. In a ring, also the k and v that were received last."""
        return 4 * sizes.heads + (2 * sizes.number * sizes.kv if sizes.ring > 1 else 0.0)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, layer: Attention, layout: PackedLayout) -> Tensor:
        past = layout.past
        o, log_rest = self._break(q, k, v, layer, layout)
        if self.remainder:
            own = v if past is None else v[past.rows]
            own = own.repeat_interleave(q.shape[1] // v.shape[1], 1)
            o = o + (log_rest.exp()[..., None] * own).to(o.dtype)
        return o

    def _break(self, q: Tensor, k: Tensor, v: Tensor, layer: Attention, layout: PackedLayout) -> tuple[Tensor, Tensor]:
        """Returns o without the remainder [T, N, H], and the logarithm of the unspent stick [T, N]."""
        from ssscale_kernels.stickbreaking import stickbreaking_attention

        from ssscale.parallel.stickbreaking_ring import ring_stickbreaking

        past = layout.past
        if layout.ring is not None:
            return ring_stickbreaking(q, k, v, layout, layer.groups, layer.scale, self.skip_below)
        return stickbreaking_attention(
            q,
            k,
            v,
            cu_seqlens_q=layout.cu_seqlens,
            cu_seqlens_k=layout.cu_seqlens if past is None else past.cu_seqlens,
            max_seqlen_q=layout.max_seqlen,
            max_seqlen_k=layout.max_seqlen if past is None else past.capacity,
            q_offsets=None if past is None else past.offsets,
            scale=layer.scale,
            skip_below=self.skip_below,
        )

    def look(self, q: Tensor, k: Tensor, v: Tensor, layer: Attention, layout: PackedLayout) -> Tensor:
        """Returns the mean unspent stick over all queries and heads, and `live_tiles` of the longest document.

        With `skip_below` > 0 on a GPU, the unspent stick is an upper bound.
        """
        import torch

        _, log_rest = self._break(q, k, v, layer, layout)
        ends = layout.cu_seqlens.tolist()
        first, last = max(pairwise(ends), key=lambda pair: pair[1] - pair[0])
        live = live_tiles(q[first:last], k[first:last], layer.scale or q.shape[2] ** -0.5, self.skip_below)
        return torch.stack([log_rest.exp().mean(), log_rest.new_tensor(live)])


def live_tiles(q: Tensor, k: Tensor, scale: float, skip_below: float) -> float:
    """Returns the share of a document's causal tiles that are live.

    A tile is 128 queries × 64 keys. It is live if some query still has at least `skip_below` of its stick when it
    reaches the tile.
    q: [T, N, H], k: [T, K, H]. Only the first HEADS heads are counted.
    """
    import torch
    from torch.nn.functional import logsigmoid, pad

    heads = min(HEADS, q.shape[1])
    group = q.shape[1] // k.shape[1]
    k = k.repeat_interleave(group, 1)[:, :heads].float()
    length, least = len(q), math.log(max(skip_below, 1e-38))
    live = total = 0
    for first in range(0, length, BLOCK):
        last = min(first + BLOCK, length)
        queries, keys = torch.arange(first, last, device=q.device), torch.arange(last, device=q.device)
        z = scale * torch.einsum("qnh,knh->nqk", q[first:last, :heads].float(), k[:last])
        log_keep = torch.where(keys < queries[:, None], logsigmoid(-z), 0.0)
        tiles = pad(log_keep, (0, -last % KEYS)).unflatten(2, (-1, KEYS)).sum(-1)  # [N, queries, key tiles]
        entering = tiles.flip(-1).cumsum(-1).flip(-1) - tiles
        # The tiles with at least one key that the query attends to.
        own = keys[::KEYS] < queries[:, None]
        counted = pad(own & (entering >= least), (0, 0, 0, -(last - first) % ROWS))
        live += int(counted.unflatten(1, (-1, ROWS)).any(2).sum())
        total += heads * int(pad(own, (0, 0, 0, -(last - first) % ROWS)).unflatten(0, (-1, ROWS)).any(1).sum())
    return live / max(total, 1)
