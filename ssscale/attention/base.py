"""What the attention cores share: a core is a function of (q, k, v, layout), without projections or rotations."""

from collections.abc import Callable

from torch import Tensor, nn

from ssscale.config.schema import ModelConfig
from ssscale.layout import PackedLayout
from ssscale.parallel.context import heads_to_tokens, tokens_to_heads
from ssscale.parallel.groups import Groups
from ssscale.position import Tables, rotate

# Writes this pass's k and v into a cache and returns those of all passes.
Extend = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


class AttentionCore(nn.Module):
    """Turns q, k and v into a weighted sum of values within each document.

    q: [T, N, H]; k, v: [T, K, H] for the heads of this tensor-parallel rank, or the whole cache where the layout says that
    keys were cached (`layout.past`). Returns [T, N, H].
    Which position methods a core can be combined with is data: `ssscale.config.schema.POSITIONS`.
    """

    def __init__(self, config: ModelConfig, groups: Groups) -> None:
        super().__init__()
        self.groups = groups
        self.scale = config.width.attention_scale  # None: 1 / sqrt(H)
        self.window = config.position.window

    def query_factor(self, tables: Tables) -> Tensor | None:
        """[T, N] float32 by which q is multiplied, in float32 and before it is rounded; None for no factor."""
        return None

    def attend(
        self, qkv: Tensor, num_heads: int, layout: PackedLayout, tables: Tables, extend: Extend | None = None
    ) -> Tensor:
        """Positions and core together, from the fused projection [T, N + 2K, H]. Returns [T, N, H].

        A core whose kernel takes the projection as it is overrides this.
        """
        num_kv_heads = (qkv.shape[1] - num_heads) // 2
        q, k, v = qkv.split((num_heads, num_kv_heads, num_kv_heads), 1)
        q, k = rotate(q, k, tables, self.query_factor(tables))
        if extend is not None:
            k, v = extend(k, v)
        if layout.gathered is None:
            return self(q, k, v, layout)
        rows, whole = layout.gathered.rows, layout.gathered.layout
        return heads_to_tokens(self(*tokens_to_heads(q, k, v, rows, self.groups), whole), rows, self.groups)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, layout: PackedLayout) -> Tensor:
        raise NotImplementedError
