"""Declarations of learned tensors other than matrices and the norms of blocks. Does not need torch."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ssscale.config.schema import ModelConfig


@dataclass(frozen=True)
class Weight:
    """A learned tensor. Parameter counts, building, initialisation and export follow from its declaration.

    shape: in the whole model. start: the value of every element at the start of training. bound: if given, the elements
    are drawn from U(−bound, bound) instead. split: the dimension that tensor parallelism splits, which is the one of
    the heads; None: every rank holds the whole tensor.
    """

    shape: tuple[int, ...]
    start: float = 0.0
    bound: float | None = None
    split: int | None = None


def projection_weights(model: "ModelConfig") -> dict[str, Weight]:
    """Returns the biases of a layer's query, key and value projections, and the norms of q and k, as the model has them.

    Biases have one dimension, like norms, so that they get no weight decay and the learning rate of vectors.
    """
    found: dict[str, Weight] = {}
    heads = {"q": model.num_heads, "k": model.kv_heads, "v": model.kv_heads}
    if model.qkv_bias:
        found |= {f"{name}_bias": Weight((count * model.head_size,), split=0) for name, count in heads.items()}
    if model.qk_norm:
        found |= {f"{name}_norm": Weight((model.head_size,), start=1.0) for name in ("q", "k")}
    return found
