"""CUDA graphs of the blocks (`train.cuda_graphs`): one launch by the host for each block and pass, in place of about a hundred.

Where a microbatch is small or tensor parallelism divides it, the host launches kernels more slowly than a GPU runs them. A
graph holds all launches of a block's forward pass, or of its backward pass, and has the same kernels with the same
arguments, so the results have the same bits. Embedding, head, loss, the gradients' hooks and the optimizer are launched as
before.

**Memory.** A graph reads and writes the same addresses each time. So a block's input is the memory of the output of the block
before, and layouts and tables are copied to where the graphs read them, once per microbatch. All graphs share one pool,
in which recording takes what a microbatch needs at its peak. The gradients of the weights stay in it.

**Shapes.** Graphs are recorded when `AFTER` microbatches in sequence have fitted the one before, and serve all that fit: as
many tokens, and no more boundaries of documents, which are padded with empty ones. The first microbatch with more boundaries
drops the graphs, because their memory and its own would not fit together. Then graphs with more boundaries are recorded, so
that a run records a few times at its start. Passes without gradients run without graphs.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ssscale.config.schema import Config
from ssscale.errors import UserError
from ssscale.layout import PackedLayout
from ssscale.model.decoder import Block, Decoder
from ssscale.model.mixers.base import Tables
from ssscale.parallel.copies import peers_of

logger = logging.getLogger("ssscale")

AFTER = 3  # before that, kernels are compiled and the slots of exchanges made
MOST = 20  # recordings: more would mean that shapes never settle
Norms = tuple[Tensor | None, Tensor | None]


class DifferentError(Exception):
    """Two values do not have the same shape."""


def kept(value: Any) -> Any:
    """Returns the value with all tensors in it copied. Raises DifferentError for what graphs cannot read."""
    if isinstance(value, Tensor):
        if value.requires_grad:
            raise DifferentError
        return value.clone()
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{field.name: kept(getattr(value, field.name)) for field in fields(value)})
    if isinstance(value, tuple):
        parts = [kept(part) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    if isinstance(value, (int, float, str)) or value is None:
        return value
    raise DifferentError


def pairs(old: Any, new: Any) -> list[tuple[Tensor, Tensor]]:
    """Returns the tensors of `old`, which `kept` has returned, with those of `new`. Raises DifferentError."""
    if type(old) is not type(new):
        raise DifferentError
    if isinstance(old, Tensor):
        if (old.shape, old.stride(), old.dtype) != (new.shape, new.stride(), new.dtype) or new.requires_grad:
            raise DifferentError
        return [(old, new)]
    if is_dataclass(old):
        parts = [(getattr(old, field.name), getattr(new, field.name)) for field in fields(old)]
    elif isinstance(old, tuple) and len(old) == len(new):
        parts = list(zip(old, new, strict=True))
    elif old == new:
        parts = []
    else:
        raise DifferentError
    return [pair for part in parts for pair in pairs(*part)]


class Recorded:
    """The graphs of a block. x: its input. out: its output. of_out: the gradient of `out`, which backward reads.

    weights: of the block, but not those of its norms if the caller sums their gradients and passes them. aliases: by `id` of
    a weight, another leaf with the same memory, for autograd has bound the weight to the stream of the training, which
    cannot be recorded. inputs: x, the norms' weights, and the aliases. gradients: those of `inputs`.
    """

    def __init__(self, x: Tensor, norms: Norms, block: Block) -> None:
        self.block, self.forward, self.backward = block, torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        self.x = x.detach()
        given = [norm.detach().requires_grad_() for norm in norms if norm is not None]
        self.norms: Norms = (given[0], given[1]) if given else (None, None)
        passed = {id(block.attention_norm.weight), id(block.mlp_norm.weight)} if given else set()
        self.weights = [weight for weight in block.parameters() if id(weight) not in passed]
        self.aliases = {id(weight): nn.Parameter(weight.detach()) for weight in self.weights}
        self.inputs = [self.x.requires_grad_(), *given, *self.aliases.values()]
        self.out = self.of_out = torch.empty(0)
        self.gradients: tuple[Tensor | None, ...] = ()

    @contextmanager
    def reading_aliases(self) -> Iterator[None]:
        """Within it, the block has `aliases` in place of its weights."""
        changed = []
        for module in self.block.modules():
            for name, weight in module._parameters.items():
                if id(weight) in self.aliases:
                    changed.append((module._parameters, name, weight))
        for owned, name, weight in changed:
            owned[name] = self.aliases[id(weight)]
        try:
            yield
        finally:
            for owned, name, weight in changed:
                owned[name] = weight


class _Replay(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, recorded: Recorded, x: Tensor, *_: Tensor) -> Tensor:
        ctx.recorded = recorded
        if x.data_ptr() != recorded.x.data_ptr():
            recorded.x.copy_(x)
        recorded.forward.replay()
        return recorded.out.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        recorded = ctx.recorded
        if gradient.data_ptr() != recorded.of_out.data_ptr():
            recorded.of_out.copy_(gradient)
        recorded.backward.replay()
        return None, *(None if found is None else found.detach() for found in recorded.gradients)


def padded(layout: PackedLayout, like: PackedLayout) -> PackedLayout:
    """Returns the same documents with as many boundaries as `like`, or more if they are more, padded with empty documents.

    That all have one length, which allows other kernels, is left out if `like` does not say so.
    """
    missing = max(0, len(like.cu_seqlens) - len(layout.cu_seqlens))
    cu_seqlens = F.pad(layout.cu_seqlens, (0, missing), value=len(layout.positions))
    uniform = None if like.uniform_length is None else layout.uniform_length
    return replace(layout, cu_seqlens=cu_seqlens, uniform_length=uniform)


class BlockGraphs:
    """Runs the blocks of a compiled decoder from graphs, wherever gradients are wanted and the microbatch fits."""

    def __init__(self, model: Decoder, copy_engines: bool) -> None:
        """copy_engines: whether blocks exchange tokens by them. They must have no other exchanges."""
        groups = model.groups
        self.blocks: list[Block] = list(model.blocks)
        self.compiled: list[Callable[..., Any]] = []  # by block, what runs without graphs
        self.peers = peers_of(groups.tensor_group, groups.device) if copy_engines else None
        self.turns: Any = None  # of the recorded exchanges
        self.unseen = 0  # bytes of the graphs' pool that torch does not count as allocated
        self.recorded: list[Recorded] = []
        self.layouts: dict[str, tuple[PackedLayout, Tables]] = {}  # by mixer: what the graphs read
        self.latest: dict[str, tuple[PackedLayout, Tables, bool]] = {}  # by mixer: the last seen, and whether it fits
        self.same = 0  # microbatches in sequence that fitted the one before, as long as nothing is recorded
        self.times = 0  # recordings
        self.refused: set[str] = set()  # mixers that prevent them
        for number, block in enumerate(self.blocks):
            self.compiled.append(block._compiled_call_impl or block.forward)
            block._compiled_call_impl = self._call(number)

    def _call(self, number: int) -> Callable[..., Any]:
        compiled, mixer = self.compiled[number], self.blocks[number].attention.mixer.name

        def call(
            x: Tensor, layout: PackedLayout, tables: Tables, cache: Any = None, norms: Norms = (None, None)
        ) -> Any:
            if cache is not None or not torch.is_grad_enabled():
                return compiled(x, layout, tables, cache, norms)
            if number == 0:
                self._begin(x, layout, tables, norms)
            if not (self._fits(mixer, layout, tables) and self.recorded):
                return compiled(x, layout, tables, cache, norms)
            recorded = self.recorded[number]
            given = () if norms[0] is None else norms
            return _Replay.apply(recorded, x, *given, *recorded.weights), {}

        return call

    def _fits(self, mixer: str, layout: PackedLayout, tables: Tables) -> bool:
        """Whether a microbatch fits `layouts`, which then get its values. If not, its own take their place, unless recorded."""
        seen = self.latest.get(mixer)
        if seen is not None and seen[0] is layout and seen[1] is tables:
            return seen[2]
        old, found = self.layouts.get(mixer), None
        read = layout if old is None else padded(layout, old[0]), tables
        if old is not None:
            with suppress(DifferentError):
                found = pairs(old, read)
        if found is not None:
            torch._foreach_copy_(*map(list, zip(*found, strict=True)))
        elif not self.recorded:
            self._keep(mixer, read)
        self.latest[mixer] = layout, tables, found is not None
        return found is not None

    def _keep(self, mixer: str, read: tuple[PackedLayout, Tables]) -> None:
        """Makes copies of a layout and tables what the graphs will read, or says once that they cannot."""
        try:
            self.layouts[mixer] = kept(read)
        except DifferentError:
            if mixer not in self.refused:
                logger.warning("no CUDA graphs: they cannot read what the mixer %s makes for each batch", mixer)
            self.refused.add(mixer)
            self.layouts.pop(mixer, None)

    def _begin(self, x: Tensor, layout: PackedLayout, tables: Tables, norms: Norms) -> None:
        """Begins a microbatch. Drops the graphs if it does not fit, or records some if it is time."""
        mixer = self.blocks[0].attention.mixer.name
        fits = self._fits(mixer, layout, tables)
        if self.recorded and fits:
            return
        if self.recorded:
            self.recorded, self.turns, self.unseen = [], None, 0
            _free_memory()
            self.latest.clear()
            fits = self._fits(mixer, layout, tables)
        self.same = self.same + 1 if fits else 0
        mixers = {block.attention.mixer.name for block in self.blocks}
        if self.same >= AFTER and self.times < MOST and mixers == set(self.layouts):
            self._record(x, norms)
            self.times += 1
            if self.times == MOST:
                logger.warning("CUDA graphs were recorded for the last time: the number of documents keeps growing")

    def _record(self, x: Tensor, norms: Norms) -> None:
        """Records all graphs. Collective over the tensor-parallel ranks."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream), torch.autograd.set_multithreading_enabled(False):
            self._rehearse(x, norms)
            allocated, reserved = _memory()
            with nullcontext() if self.peers is None else self.peers.recording() as self.turns:
                self.recorded = self._record_forward(x, norms, pool := torch.cuda.graph_pool_handle())
                self._record_backward(pool)
        torch.cuda.current_stream().wait_stream(stream)
        allocated, reserved = (now - before for now, before in zip(_memory(), (allocated, reserved), strict=True))
        self.unseen = reserved - allocated
        torch.cuda.reset_peak_memory_stats()
        logger.info("both passes of %d blocks recorded as CUDA graphs, %.1f GiB", len(self.recorded), reserved / 2**30)

    def _run(self, number: int, recorded: Recorded) -> Tensor:
        read = self.layouts[self.blocks[number].attention.mixer.name]
        with recorded.reading_aliases():
            out, terms = self.compiled[number](recorded.inputs[0], *read, None, recorded.norms)
        assert not terms, "a block that returns terms of the loss"
        return out

    def _rehearse(self, x: Tensor, norms: Norms) -> None:
        """Runs both passes of each block with tensors like those of the recording, so that nothing is left to compile."""
        for number, block in enumerate(self.blocks):
            trial = Recorded(torch.zeros_like(x), norms, block)
            out = self._run(number, trial)
            torch.autograd.grad(out, trial.inputs, torch.zeros_like(out), allow_unused=True)

    def _record_forward(self, x: Tensor, norms: Norms, pool: Any) -> list[Recorded]:
        found: list[Recorded] = []
        x = torch.empty_like(x)
        for number, block in enumerate(self.blocks):
            recorded = Recorded(x, norms, block)
            with _into(recorded.forward, pool):
                recorded.out = self._run(number, recorded)
            self._check_turns()
            x = recorded.out
            found.append(recorded)
        return found

    def _record_backward(self, pool: Any) -> None:
        """The gradients of the blocks' inputs alternate between two places. Those of weights stay where they are."""
        places = [torch.empty_like(self.recorded[0].x) for _ in range(2)]
        gradient = torch.empty_like(places[0])
        for number, recorded in reversed(list(enumerate(self.recorded))):
            recorded.of_out = gradient
            place = places[number % 2]
            with _into(recorded.backward, pool):
                first, *others = torch.autograd.grad(recorded.out, recorded.inputs, gradient, allow_unused=True)
                place.copy_(first)
                del first
            self._check_turns()
            recorded.out = recorded.out.detach()
            gradient, recorded.gradients = place, (place, *others)

    def _check_turns(self) -> None:
        assert self.turns is None or self.turns.number % 2 == 0, "a block with an odd number of exchanges"


def _free_memory() -> None:
    """Gives back what torch has reserved and nothing uses."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()


def _memory() -> tuple[int, int]:
    """Returns the bytes that torch has allocated, and the least that it must reserve for them."""
    _free_memory()
    return torch.cuda.memory_allocated(), torch.cuda.memory_reserved()


def record_blocks(model: Decoder, config: Config) -> BlockGraphs | None:
    """Lets a compiled model run its blocks from graphs. Returns None where GPUs cannot exchange tokens by copy engines."""
    if model.groups.tensor_size > 1 and not model.copy_engines:
        if config.train.cuda_graphs is True:
            raise UserError("train.cuda_graphs=true needs GPUs that can access each other's memory: use false")
        return None
    return BlockGraphs(model, model.copy_engines)


@contextmanager
def _into(graph: torch.cuda.CUDAGraph, pool: Any) -> Iterator[None]:
    """Records what the current stream does. `torch.cuda.graph` also empties the allocator's cache, each time."""
    graph.capture_begin(pool, capture_error_mode="thread_local")
    try:
        yield
    except BaseException:
        with suppress(RuntimeError):  # of the failed recording
            graph.capture_end()
        raise
    graph.capture_end()
