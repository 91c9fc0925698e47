"""What the attention cores share: a core is a function of (q, k, v, layout), without projections or rotations."""

from torch import Tensor, nn

from ssscale.layout import PackedLayout
from ssscale.parallel.groups import Groups
from ssscale.schema import ModelConfig


class AttentionCore(nn.Module):
    """Turns q, k and v into a weighted sum of values within each document.

    q: [T, N, H]; k, v: [T, K, H] for the heads of this tensor-parallel rank, or the whole cache where the layout says that
    keys were cached (`layout.past`). Returns [T, N, H].
    Which position methods a core can be combined with is data: `ssscale.schema.POSITIONS`.
    """

    def __init__(self, config: ModelConfig, groups: Groups) -> None:
        super().__init__()
        self.scale = config.width.attention_scale  # None: 1 / sqrt(H)
        self.window = config.position.window

    def query_factor(self, layout: PackedLayout) -> Tensor | None:
        """[T, N] float32 by which q is multiplied, in float32 and before it is rounded; None for no factor."""
        return None

    def forward(self, q: Tensor, k: Tensor, v: Tensor, layout: PackedLayout) -> Tensor:
        raise NotImplementedError
