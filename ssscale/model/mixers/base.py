"""What a mixer declares: one way in which a layer turns q, k and v into weighted sums of earlier values.

A mixer is a frozen dataclass whose fields are its options, `model.mixer.NAME.OPTION`, registered under its name:

    @MIXERS.register("mean")
    @dataclass(frozen=True)
    class Mean(Mixer): ...

Everything that the rest of the stack asks about a mixer is a method or an attribute here. What one leaves out is refused with
a sentence where it is needed; no mixer is taken for another. Its file imports torch only where it computes, as commands
check a configuration before they import torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from ssscale.errors import UserError
from ssscale.model.positions.base import Position, Rotation
from ssscale.model.positions.nope import NoPosition
from ssscale.model.weight import Weight

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from ssscale.config.schema import ModelConfig
    from ssscale.layout import PackedLayout
    from ssscale.model.decoder import Attention, Weights

# Writes this pass's k and v into a cache and returns those of all passes.
Extend = Callable[["Tensor", "Tensor"], "tuple[Tensor, Tensor]"]


class Tables(NamedTuple):
    """What all layers of one mixer share of a batch: the rotation of q and k, and what `Mixer.prepare` made."""

    rotation: Rotation | None = None
    own: Any = None


@dataclass(frozen=True)
class Export:
    """A mixer's part of the model that transformers runs: functions in plain torch whose source travels with the weights.

    mix(q, k, v, batch, layer) → o, on the names that ssscale/hf/modeling_ssscale.py has. factor(batch, layer) → what q is
    multiplied by in float32. prepare(batch, model) → what all layers share of a batch. helpers: what these call.
    """

    mix: Callable[..., Any]
    factor: Callable[..., Any] | None = None
    prepare: Callable[..., Any] | None = None
    helpers: tuple[Callable[..., Any], ...] = ()


@dataclass(frozen=True)
class Sizes:
    """One token of one layer on one rank."""

    number: int  # bytes of an element
    q: float  # elements of q (or the output)
    kv: float  # of k (or v)
    heads: float  # query heads
    rotated: bool  # the position method makes changed copies of q and k
    ulysses: int = 1
    ring: int = 1


@dataclass(frozen=True)
class Mixer:
    """`name` is filled in by the registration."""

    name: ClassVar[str]
    # What it goes with
    positions: ClassVar[tuple[str, ...]] = ("nope",)  # of ssscale/model/positions
    positions_reason: ClassVar[str] = ""  # why no others
    no_window: ClassVar[str | None] = "has no code for one"  # why it takes no sliding window; None: it takes one
    ulysses: ClassVar[bool] = False  # its heads can be computed on ranks of their own, all tokens of a row together
    ring: ClassVar[bool] = False  # it merges what it finds in keys of other ranks
    cached: ClassVar[bool] = False  # it reads keys of earlier passes (`layout.past`)
    begins_from: ClassVar[str | None] = None  # the mixer from whose weights a model with this one can begin
    kept_operators: ClassVar[tuple[str, ...]] = ()  # parts of names of what selective recomputation does not run again
    exact: ClassVar[Mapping[str, object]] = {}  # options under which it leaves nothing out
    export: ClassVar[Export | None] = None

    @property
    def plain(self) -> bool:
        """Whether it is attention as Llama has it, for which transformers has models of its own."""
        return False

    @property
    def terms(self) -> Mapping[str, float]:
        """What `measure` gives: name → weight in the loss, 0 for what is only logged."""
        return {}

    def check(self, model: ModelConfig) -> None:
        """Raise UserError where the options do not go together."""

    def without_position(self) -> Position:
        """What its layers have in a model whose position method it does not take."""
        return NoPosition()

    # What it learns and what it costs

    def weights(self, model: ModelConfig) -> dict[str, Weight]:
        """What each layer learns besides its projections."""
        return {}

    def shared_weights(self, model: ModelConfig, length: int) -> dict[str, Weight]:
        """What all layers learn together. length: of the training rows."""
        return {}

    def flops(self, width: int, keys: float) -> float:
        """Of a token in forward and backward over so many keys, in one layer of num_heads · head_dim = width."""
        raise self.lacks("flops", "what it computes is not known")

    def kept_bytes(self, sizes: Sizes) -> float:
        """Bytes of a token that backward needs of one layer besides q, k, v and the output, which every mixer keeps."""
        raise self.lacks("kept_bytes", "the memory of a run cannot be estimated")

    # How a model changes to it

    def begun(self, model: ModelConfig, length: int) -> Mixer:
        """Its options where a model of the mixer `begins_from`, trained on rows of `length`, goes on with this one."""
        return self

    # How it runs

    def prepare(self, layout: PackedLayout, window: int | None, shared: Weights | None) -> Any:
        """What all layers share of a batch, as `Tables.own`. shared: the model's `shared_weights`."""
        return None

    def mix(
        self, qkv: Tensor, layer: Attention, layout: PackedLayout, tables: Tables, extend: Extend | None = None
    ) -> Tensor:
        """Positions and mixing together, from the projection [T, N + 2K, H] of this rank's heads. Returns [T, N, H].

        Under Ulysses the ranks exchange tokens for heads around `attend`, which is called through the layer, where it can be
        watched. A mixer whose kernel takes the projection as it is overrides this.
        """
        from ssscale.parallel.context import heads_to_tokens, tokens_to_heads

        q, k, v = qkv.split((layer.heads, layer.kv_heads, layer.kv_heads), 1)
        q, k = rotated(q, k, tables.rotation, self.query_factor(layer, tables))
        if extend is not None:
            k, v = extend(k, v)
        if layout.gathered is None:
            return layer.attend(q, k, v, layout)
        rows, whole = layout.gathered.rows, layout.gathered.layout
        q, k, v = tokens_to_heads(q, k, v, rows, layer.groups)
        return heads_to_tokens(layer.attend(q, k, v, whole), rows, layer.groups)

    def measure(self, qkv: Tensor, mixed: Tensor, layer: Attention, layout: PackedLayout) -> dict[str, Tensor]:
        """`terms` of one layer, float32 scalars: sums over this rank's tokens, the same on all tensor-parallel ranks.

        qkv: the projection, mixed: what `mix` made of it. What is summed over a rank's heads goes through `sum_over_heads`.
        """
        return {}

    def query_factor(self, layer: Attention, tables: Tables) -> Tensor | None:
        """[T, N] float32 by which q is multiplied, in float32 and before it is rounded; None for no factor."""
        return None

    def attend(self, q: Tensor, k: Tensor, v: Tensor, layer: Attention, layout: PackedLayout) -> Tensor:
        """q [T, N, H]; k, v [T, K, H], or the whole cache where the layout says that keys were cached → [T, N, H]."""
        raise NotImplementedError

    def plan_decode(
        self, starts: list[int], lengths: list[int], rows: Tensor, capacity: int, window: int | None
    ) -> Any:
        """What all layers need of a pass over cached keys, as `layout.past.decode`."""
        return None

    # What can be seen of it

    def chosen(self, model: ModelConfig, device: torch.device, dtype: torch.dtype, length: int) -> str:
        """The kernel that runs, for the log."""
        return ""

    def observed_weights(self, layer: Attention) -> dict[str, Tensor]:
        """Learned numbers to log by layer and head: name → [N] of this rank's heads."""
        return {}

    observes: ClassVar[tuple[str, ...]] = ()  # the names of what `look` returns

    def look(self, q: Tensor, k: Tensor, v: Tensor, layer: Attention, layout: PackedLayout) -> Tensor:
        """[len(observes)] float32 of one layer, from what goes into `attend`; run without gradients and torch.compile."""
        raise NotImplementedError

    def lacks(self, what: str, so: str) -> UserError:
        return UserError(f"model.mixers: {self.name} does not define `{what}`, so that {so}")


def rotated(q: Tensor, k: Tensor, rotation: Rotation | None, factor: Tensor | None) -> tuple[Tensor, Tensor]:
    """q and k with their positions in them, q times `factor` [T, N] as well (in float32, rounded once)."""
    from ssscale_kernels.rotation import rotate

    cos, sin = rotation or (None, None)
    return rotate(q, cos, sin, factor), rotate(k, cos, sin)
