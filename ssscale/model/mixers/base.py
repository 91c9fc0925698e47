"""The base class of mixers. A mixer turns q, k and v of one layer into weighted sums of earlier values.

A mixer is a frozen dataclass that is registered under its name. Its fields are its options, `model.mixer.NAME.OPTION`:

    @MIXERS.register("mean")
    @dataclass(frozen=True)
    class Mean(Mixer): ...

Everything that the rest of the stack asks about a mixer is an attribute or a method of this class. If a mixer leaves
one out that a run needs, the run is refused with an error that says so; there is no fallback to another mixer. The file
of a mixer imports torch only inside functions, because commands check a configuration before they import torch.
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

# Stores k and v of this pass in the cache and returns those of all passes.
Extend = Callable[["Tensor", "Tensor"], "tuple[Tensor, Tensor]"]


class Tables(NamedTuple):
    """What all layers of one mixer share for a batch: the rotation of q and k, and the result of `Mixer.prepare`."""

    rotation: Rotation | None = None
    own: Any = None


@dataclass(frozen=True)
class Export:
    """The code of a mixer in exported models: functions in plain torch whose source is saved with the weights.

    They may use the names that ssscale/hf/modeling_ssscale.py defines, and read weights by `layer.learned(name)`:
    attributes of `layer.weights` are empty while the weights are on a disk. mix(q, k, v, batch, layer) → o. factor(batch,
    layer) → the float32 factor of q. prepare(batch, model) → what all layers share for a batch. helpers: functions that
    the others call.
    """

    mix: Callable[..., Any]
    factor: Callable[..., Any] | None = None
    prepare: Callable[..., Any] | None = None
    helpers: tuple[Callable[..., Any], ...] = ()


@dataclass(frozen=True)
class Sizes:
    """The sizes of one token in one layer on one rank, for memory estimates."""

    number: int  # bytes per element
    q: float  # elements of q (or the output)
    kv: float  # elements of k (or v)
    heads: float  # query heads
    rotated: bool  # True if the position method makes changed copies of q and k
    ulysses: int = 1
    ring: int = 1


@dataclass(frozen=True)
class Mixer:
    """The base class. The registration sets `name`."""

    name: ClassVar[str]
    # What it can be combined with
    positions: ClassVar[tuple[str, ...]] = ("nope",)  # names of position methods (ssscale/model/positions)
    positions_reason: ClassVar[str] = ""  # why it takes no others
    no_window: ClassVar[str | None] = "has no code for one"  # why it takes no sliding window; None if it takes one
    ulysses: ClassVar[bool] = False  # it can run some of the heads on each rank, with all tokens of a row
    ring: ClassVar[bool] = False  # it can merge results for keys of other ranks
    cached: ClassVar[bool] = False  # it can read the keys of earlier passes (`layout.past`)
    begins_from: ClassVar[str | None] = None  # the mixer whose weights a model with this one can start from
    kept_operators: ClassVar[tuple[str, ...]] = ()  # substrings of operator names that selective recomputation keeps
    exact: ClassVar[Mapping[str, object]] = {}  # options under which it is exact
    export: ClassVar[Export | None] = None

    @property
    def plain(self) -> bool:
        """Whether it is Llama's attention, for which transformers has its own model classes."""
        return False

    @property
    def takes_positions(self) -> bool:
        """Whether it takes any position method other than none."""
        return self.positions != Mixer.positions

    @property
    def varies(self) -> tuple[str, str] | None:
        """The option by which results differ from run to run on a GPU, as NAME=VALUE, and the reason; None: none does."""
        return None

    @property
    def terms(self) -> Mapping[str, float]:
        """The terms that `measure` returns: name → weight in the loss, 0 if it is only logged."""
        return {}

    def check(self, model: ModelConfig) -> None:
        """Raises UserError if the options contradict each other or the model."""

    def without_position(self) -> Position:
        """The position method of its layers if it does not take the model's."""
        return NoPosition()

    # What it learns and what it costs

    def weights(self, model: ModelConfig) -> dict[str, Weight]:
        """The weights of each layer besides its projections."""
        return {}

    def shared_weights(self, model: ModelConfig, length: int) -> dict[str, Weight]:
        """The weights that all layers share. length: tokens per training row."""
        return {}

    def flops(self, width: int, keys: float) -> float:
        """FLOPs of forward and backward per token and layer, over `keys` keys. width: num_heads · head_dim."""
        raise self.lacks("flops", "what it computes is not known")

    def kept_bytes(self, sizes: Sizes) -> float:
        """Bytes per token and layer that backward needs besides q, k, v and the output, which every mixer keeps."""
        raise self.lacks("kept_bytes", "the memory of a run cannot be estimated")

    # How a model switches to it

    def begun(self, model: ModelConfig, length: int) -> Mixer:
        """Returns its options for a model that starts from `begins_from`. length: tokens per training row."""
        return self

    # How it runs

    def prepare(self, layout: PackedLayout, window: int | None, shared: Weights | None) -> Any:
        """Returns what all layers share for a batch, as `Tables.own`. shared: the weights of `shared_weights`."""
        return None

    def mix(
        self, qkv: Tensor, layer: Attention, layout: PackedLayout, tables: Tables, extend: Extend | None = None
    ) -> Tensor:
        """Applies positions and mixes. qkv: the projection [T, N + 2K, H] of this rank's heads. Returns [T, N, H].

        Under Ulysses, the ranks exchange tokens for heads before and after `attend`. It is called through the layer,
        where it can be observed. A mixer whose kernel takes the projection directly overrides this method.
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
        """Returns the `terms` of one layer: float32 scalars, sums over this rank's tokens.

        They must be equal on all tensor-parallel ranks, so sums over heads go through `sum_over_heads`. qkv: the
        projection.
        mixed: the output of `mix`.
        """
        return {}

    def query_factor(self, layer: Attention, tables: Tables) -> Tensor | None:
        """Returns the factor of q, [T, N] float32, or None. It is applied in float32 before q is rounded."""
        return None

    def attend(self, q: Tensor, k: Tensor, v: Tensor, layer: Attention, layout: PackedLayout) -> Tensor:
        """Returns [T, N, H] from q [T, N, H] and k, v [T, K, H]. With `layout.past`, k and v are the whole cache."""
        raise NotImplementedError

    def plan_decode(
        self, starts: list[int], lengths: list[int], rows: Tensor, capacity: int, window: int | None
    ) -> Any:
        """Returns what all layers need for a pass over cached keys, which becomes `layout.past.decode[self.name]`."""
        return None

    # What can be observed

    def chosen(self, model: ModelConfig, device: torch.device, dtype: torch.dtype, length: int) -> str:
        """Returns a description of the kernel that runs, for the log."""
        return ""

    def observed_weights(self, layer: Attention) -> dict[str, Tensor]:
        """Returns the learned numbers to log by layer and head: name → [N] for this rank's heads."""
        return {}

    observes: ClassVar[tuple[str, ...]] = ()  # the names of the values that `look` returns

    def look(self, q: Tensor, k: Tensor, v: Tensor, layer: Attention, layout: PackedLayout) -> Tensor:
        """Returns [len(observes)] float32 for one layer: means over this rank's tokens and heads, or over a sample of them.

        Runs without gradients and torch.compile, on the inputs of `attend`. Tensor-parallel ranks are averaged
        afterwards, with equal weights.
        """
        raise NotImplementedError

    def lacks(self, what: str, so: str) -> UserError:
        return UserError(f"model.mixers: {self.name} does not define `{what}`, so that {so}")


def rotated(q: Tensor, k: Tensor, rotation: Rotation | None, factor: Tensor | None) -> tuple[Tensor, Tensor]:
    """Returns q and k with positions, and q times `factor` [T, N]. Computes in float32 and rounds once."""
    from ssscale_kernels.rotation import rotate

    cos, sin = rotation or (None, None)
    return rotate(q, cos, sin, factor), rotate(k, cos, sin)
