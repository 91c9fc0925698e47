"""Position methods. `tables` is computed once a batch, `rotate` in every layer."""

from torch import Tensor

from ssscale.layout import PackedLayout
from ssscale.position.rope import apply_rope, rope_tables
from ssscale.schema import ModelConfig, PositionMethod

Tables = tuple[Tensor, Tensor] | None


def position_tables(config: ModelConfig, layout: PackedLayout) -> Tables:
    """What every layer needs of the positions of this batch."""
    if config.position.method == PositionMethod.rope:
        return rope_tables(layout.positions, config.head_size, config.position.rope_base)
    return None


def rotate(q: Tensor, k: Tensor, tables: Tables, factor: Tensor | None) -> tuple[Tensor, Tensor]:
    """q and k with their positions in them, q times SSMax's factor [T, N] as well (in float32, rounded once)."""
    if tables is not None:
        return apply_rope(q, *tables, factor), apply_rope(k, *tables)
    if factor is not None:
        q = (q.float() * factor[..., None]).to(q.dtype)
    return q, k
