"""The decoder: norm, MLP, attention, block, embedding, head and loss, in this order.

Shapes: T tokens of packed documents (no padding), hidden size D, vocabulary size V; N query heads and K key/value heads
of dimension H on this tensor-parallel rank. Under sequence parallelism, the residual stream is [T / tensor_size, D].
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ssscale.config.choices import Fp8, Recompute
from ssscale.config.schema import ModelConfig
from ssscale.layout import PackedLayout
from ssscale.model.mixers.base import Tables
from ssscale.model.recompute import keep_products, leave_products_whole
from ssscale.model.weight import Weight, projection_weights
from ssscale.parallel.groups import Groups
from ssscale.parallel.megatron import (
    MegatronConfig,
    column_linear,
    gather_vocabulary,
    losses_by_rows,
    megatron_config,
    padded_vocab,
    replicated,
    replicated_together,
    row_linear,
    squared_log_z,
    token_losses,
    vocabulary_embedding,
    without_padding,
)
from ssscale.parallel.splits import global_shape, mark_split

if TYPE_CHECKING:
    from ssscale.model.cache import KVCache, LayerCache

VOCAB_WEIGHTS = ("embedding.weight", "head.weight")  # weights with one row per vocabulary entry
Z_LOSS = "z_loss"

# By name, float32 scalars beside the losses, added to the loss or only logged: sums over this rank's tokens.
Terms = dict[str, Tensor]


class RMSNorm(nn.Module):
    """y = x / sqrt(mean(x²) + ε) · w over the last dimension   (arXiv:1910.07467, Eq. 4)

    partial: set under sequence parallelism, where each tensor-parallel rank holds only some of the tokens. The gradient
    of w is then summed over these ranks.
    """

    def __init__(self, size: int, eps: float, groups: Groups, partial: bool) -> None:
        super().__init__()
        self.eps, self.groups, self.partial = eps, groups, partial
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor, weight: Tensor | None = None) -> Tensor:
        """weight: w, if the caller sums its gradient over the ranks."""
        if weight is None:
            weight = replicated(self.weight, self.groups) if self.partial else self.weight
        return F.rms_norm(x, (x.shape[-1],), weight, self.eps)


class SwiGLU(nn.Module):
    """y = W_down (silu(W_gate x) ⊙ W_up x)   (arXiv:2002.05202, Eq. 6). [T, D] → [T, D]."""

    def __init__(self, config: ModelConfig, megatron: MegatronConfig) -> None:
        super().__init__()
        size, inner = config.hidden_size, config.ffn_hidden_size
        self.gate_up = column_linear(size, (inner, inner), megatron)
        self.down = row_linear(inner, size, megatron)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x)[0].chunk(2, -1)
        return self.down(F.silu(gate) * up)[0]


class Weights(nn.Module):
    """The learned tensors that a mixer, a position method or the projections declare, filled with their start values.

    A tensor with a `split` dimension is divided over the tensor-parallel ranks. Each rank holds its slice.
    """

    def __init__(self, declared: Mapping[str, Weight], groups: Groups) -> None:
        super().__init__()
        self.groups, self.declared = groups, dict(declared)
        for name, weight in declared.items():
            shape = list(weight.shape)
            if weight.split is not None:
                shape[weight.split] //= groups.tensor_size
            parameter = nn.Parameter(torch.full(shape, weight.start))
            parameter.declared = weight  # for `initialize_weights` and `load_switched`
            if weight.split is not None:
                mark_split(parameter, weight.split, (weight.shape[weight.split],))
            self.register_parameter(name, parameter)

    def __contains__(self, name: str) -> bool:
        return name in self.declared

    def take(self, name: str) -> Tensor:
        """Returns the tensor for use with this rank's heads.

        If all ranks hold the whole tensor, its gradient is summed over the tensor-parallel ranks.
        """
        weight: Tensor = getattr(self, name)
        return replicated(weight, self.groups) if self.declared[name].split is None else weight

    def all(self) -> dict[str, Tensor]:
        return {name: self.take(name) for name in self.declared}


class Attention(nn.Module):
    """y = W_o mix(W_q x, W_k x, W_v x) with grouped queries (arXiv:2305.13245). [T, D] → [T, D].

    With `qkv_bias`, biases are added to W_q x, W_k x and W_v x. With `qk_norm`, each head of q and k then passes through
    an RMSNorm, whose weight [H] all heads of the layer share (as in Qwen2 and Qwen3). The mixer of the layer
    (ssscale/model/mixers) computes `mix`. It reads the attributes of this module.
    """

    def __init__(self, config: ModelConfig, groups: Groups, megatron: MegatronConfig, layer: int) -> None:
        super().__init__()
        self.groups = groups
        self.head_size = config.head_size
        self.heads = config.num_heads // groups.tensor_size
        self.kv_heads = config.kv_heads // groups.tensor_size
        self.scale = config.width.attention_scale  # None: 1 / sqrt(H)
        self.mixer = config.mixer_of(layer)
        self.position = config.place_of(self.mixer)
        self.window = config.position.window if self.mixer.no_window is None else None
        q_size, kv_size = config.num_heads * self.head_size, config.kv_heads * self.head_size
        self.qkv = column_linear(config.hidden_size, (q_size, kv_size, kv_size), megatron)
        self.out = row_linear(q_size, config.hidden_size, megatron)
        self.projection_weights = Weights(projection_weights(config), groups)
        self.norm_eps = config.norm_eps
        self.weights = Weights(self.mixer.weights(config), groups)
        self.position_weights = Weights(self.position.weights(config), groups)

    def forward(
        self, x: Tensor, layout: PackedLayout, tables: Tables, cache: "LayerCache | None" = None
    ) -> tuple[Tensor, Terms]:
        qkv = self._project(x)
        extend = None if cache is None else cache.extend
        mixed = self.mixer.mix(qkv, self, layout, tables, extend)  # [T, N, H]
        terms = self.mixer.measure(qkv, mixed, self, layout) if self.mixer.terms else {}
        return self.out(mixed.flatten(1))[0], terms

    def _project(self, x: Tensor) -> Tensor:
        """Returns q, k and v, one after the other: [T, N + 2K, H]."""
        qkv = self.qkv(x)[0].unflatten(-1, (-1, self.head_size))
        own = self.projection_weights
        if "q_bias" in own:
            biases = torch.cat([own.take(f"{name}_bias") for name in ("q", "k", "v")])
            qkv = qkv + biases.view(-1, self.head_size)
        if "q_norm" in own:
            q, k, v = qkv.split((self.heads, self.kv_heads, self.kv_heads), 1)
            q = F.rms_norm(q, (self.head_size,), own.take("q_norm"), self.norm_eps)
            k = F.rms_norm(k, (self.head_size,), own.take("k_norm"), self.norm_eps)
            qkv = torch.cat((q, k, v), 1)
        return qkv

    def for_heads(self, weight: Tensor, count: int) -> Tensor:
        """Returns the part of a tensor [N, ...] that belongs to the `count` heads of q in `attend`.

        These are all N heads of this rank, except under Ulysses, where each Ulysses rank attends with a slice of them.
        """
        return weight if count == len(weight) else weight.narrow(0, self.groups.ulysses_rank * count, count)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, layout: PackedLayout) -> Tensor:
        """Calls `Mixer.attend`. To observe its inputs, replace this method on the instance."""
        return self.mixer.attend(q, k, v, self, layout)


class Block(nn.Module):
    """h = x + m · attention(norm(x)); y = h + m · mlp(norm(h))   (pre-norm, as in Llama 2; m = 1 by default)

    `selective` recomputation happens inside the block and is compiled with it. `full` recomputation wraps the block.
    """

    def __init__(
        self, config: ModelConfig, groups: Groups, megatron: MegatronConfig, layer: int, recompute: Recompute
    ) -> None:
        super().__init__()
        self.selective = recompute == Recompute.selective
        self.multiplier = config.width.residual_multiplier
        partial = megatron.sequence_parallel
        self.attention_norm = RMSNorm(config.hidden_size, config.norm_eps, groups, partial)
        self.attention = Attention(config, groups, megatron, layer)
        self.mlp_norm = RMSNorm(config.hidden_size, config.norm_eps, groups, partial)
        self.mlp = SwiGLU(config, megatron)

    def forward(
        self,
        x: Tensor,
        layout: PackedLayout,
        tables: Tables,
        cache: "LayerCache | None" = None,
        norms: tuple[Tensor | None, Tensor | None] = (None, None),
    ) -> tuple[Tensor, Terms]:
        """norms: the weights of both norms, if the caller sums their gradients over the ranks."""
        if self.selective and cache is None and torch.is_grad_enabled():
            return keep_products(self.attention.mixer.kept_operators, self._layer, x, layout, tables, None, norms)
        return self._layer(x, layout, tables, cache, norms)

    def _layer(
        self,
        x: Tensor,
        layout: PackedLayout,
        tables: Tables,
        cache: "LayerCache | None",
        norms: tuple[Tensor | None, Tensor | None],
    ) -> tuple[Tensor, Terms]:
        attended, terms = self.attention(self.attention_norm(x, norms[0]), layout, tables, cache)
        x = x + self._scaled(attended)
        return x + self._scaled(self.mlp(self.mlp_norm(x, norms[1]))), terms

    def _scaled(self, branch: Tensor) -> Tensor:
        return branch if self.multiplier == 1.0 else branch * self.multiplier


class Decoder(nn.Module):
    """A Llama-2-style decoder (arXiv:2307.09288, Section 2.2) over packed documents.

    length: tokens per training row. Weights that the layers share may depend on it: SSMax's variant `pn` learns one
    p_n for each n from 1 to length.
    `self.terms` maps the name of each term to its weight in the loss, or to 0 if it is only logged. It holds the z-loss
    if `z_loss` is not 0, and the terms that the mixers declare (`Mixer.terms`). Rows of the embedding and the head
    beyond `vocab_size` are padding and get neither probability nor gradient.
    """

    def __init__(
        self,
        config: ModelConfig,
        groups: Groups,
        length: int,
        *,
        dtype: torch.dtype = torch.float32,
        sequence_parallel: bool = False,
        recompute: Recompute = Recompute.none,
        z_loss: float = 0.0,
        compile_exchanges: bool = False,
        keep_gathered: bool = False,
        overlap_gathers: bool = False,
        copy_engines: bool = False,
        norms_together: bool = False,
        fp8: Fp8 = Fp8.none,
        fp8_blocks: Collection[int] = (),
    ) -> None:
        """norms_together: gradients of the norms of all blocks are summed over the ranks at once, where these have only
        some of the tokens. The weights must stay in memory between passes. fp8: the recipe for the linear layers of
        `fp8_blocks`.
        """
        super().__init__()
        if compile_exchanges:
            groups = replace(groups, in_graph=True)
        self.config, self.groups, self.recompute = config, groups, recompute
        self.terms: dict[str, float] = {Z_LOSS: z_loss} if z_loss else {}
        for mixer in config.used.values():
            self.terms |= mixer.terms
        megatron = megatron_config(groups, sequence_parallel, dtype, keep_gathered, overlap_gathers, copy_engines)
        self.sequence_parallel, self.copy_engines = megatron.sequence_parallel, megatron.copy_engines
        self.norms_together = norms_together and self.sequence_parallel
        rows = padded_vocab(config.vocab_size, groups.tensor_size)
        self.mixers = config.used
        shared = {name: mixer.shared_weights(config, length) for name, mixer in self.mixers.items()}
        self.shared = nn.ModuleDict({name: Weights(found, groups) for name, found in shared.items() if found})
        self.embedding = vocabulary_embedding(rows, config.hidden_size, megatron)
        other = megatron if fp8 is Fp8.none else megatron.in_fp8(fp8.value)
        linear = [other if layer in fp8_blocks else megatron for layer in range(config.num_layers)]
        self.blocks = nn.ModuleList(Block(config, groups, own, layer, recompute) for layer, own in enumerate(linear))
        self.norm = RMSNorm(config.hidden_size, config.norm_eps, groups, self.sequence_parallel)
        self.head = column_linear(config.hidden_size, (rows,), megatron, own_weight=not config.tie_embeddings)
        self.to(dtype)
        if recompute == Recompute.selective:
            leave_products_whole(self)

    def num_parameters(self) -> int:
        """Returns the parameters of the whole model, not only of this tensor-parallel rank, without padding."""
        total = sum(torch.Size(global_shape(p, self.groups.tensor_size)).numel() for p in self.parameters())
        padding = padded_vocab(self.config.vocab_size, self.groups.tensor_size) - self.config.vocab_size
        return total - padding * self.config.hidden_size * (1 if self.config.tie_embeddings else 2)

    def forward(
        self,
        tokens: Tensor,
        layout: PackedLayout,
        labels: Tensor | None = None,
        *,
        cache: "KVCache | None" = None,
        rows: Tensor | None = None,
        with_terms: bool = False,
    ) -> Tensor | tuple[Tensor, Terms]:
        """Returns losses [T] float32 in nats if labels are given, otherwise logits [T, vocab_size].

        tokens, labels: [T] int64, equal on all tensor-parallel ranks. Under sequence parallelism, T is a multiple of
        their number.
        cache: the KV cache of earlier tokens. `layout` must be what its `begin` has returned for these tokens.
        rows: int64 indices of tokens; only their losses or logits are returned. The head computes no others, except
        under sequence parallelism, where it computes all.
        with_terms: also returns the values of `terms`. Each is a sum over this rank's tokens, those of mixers also over
        all layers, and is equal on all tensor-parallel ranks.
        """
        x = self._embed(tokens)
        if cache is None:
            layout = self.config.place.lay_out(layout, self.config.position.window)
        tables = self._tables(layout)
        whole = cache is None and self.recompute == Recompute.full and torch.is_grad_enabled()
        caches = [None] * len(self.blocks) if cache is None else cache.layers()
        terms = {name: torch.zeros((), device=x.device) for name in self.terms}
        for block, part, norms in zip(self.blocks, caches, self._norms(), strict=True):
            own = tables[block.attention.mixer.name]
            if whole:
                x, found = checkpoint(block, x, layout, own, None, norms, use_reentrant=False)
            else:
                x, found = block(x, layout, own, part, norms)
            terms |= {name: terms[name] + term for name, term in found.items()}
        # `rows` counts all tokens. Under sequence parallelism only the head gathers them: they are selected after it.
        late = rows is not None and self.sequence_parallel
        if rows is not None and not late:
            x, labels = x[rows], None if labels is None else labels[rows]
        out, found = self.read_out(x, labels, with_terms)
        out = out[rows] if late else out
        return (out, terms | found) if with_terms else out

    def _embed(self, tokens: Tensor) -> Tensor:
        # Megatron's embedding maps tokens [1, T] to [1, T, D]. Under sequence parallelism it returns this rank's tokens
        # with the batch as the second dimension, [T / tensor_size, 1, D].
        x = self.embedding(tokens[None]).squeeze(1 if self.sequence_parallel else 0)
        multiplier = self.config.width.embedding_multiplier
        return x if multiplier == 1.0 else x * multiplier

    def _norms(self) -> Iterable[tuple[Tensor | None, Tensor | None]]:
        """Returns by block the weights of its norms, if their gradients are summed over the ranks together."""
        if not (self.norms_together and torch.is_grad_enabled()):
            return [(None, None)] * len(self.blocks)
        weights = [norm.weight for block in self.blocks for norm in (block.attention_norm, block.mlp_norm)]
        seen = iter(replicated_together(weights, self.groups))
        return list(zip(seen, seen, strict=True))

    def _tables(self, layout: PackedLayout) -> dict[str, Tables]:
        """Returns the tensors that all layers of one mixer share for this batch, by mixer name."""
        config, window = self.config, self.config.position.window
        rotation = config.place.rotation(config.head_size, layout)
        found = {}
        for name, mixer in self.mixers.items():
            shared = self.shared[name] if name in self.shared else None  # noqa: SIM401 - ModuleDict has no get
            turned = rotation if config.place_of(mixer) is config.place else None
            found[name] = Tables(turned, mixer.prepare(layout, window, shared))
        return found

    def read_out(self, x: Tensor, labels: Tensor | None, with_terms: bool = False) -> tuple[Tensor, Terms]:
        """Returns losses [T] or logits [T, vocab_size] from the output of the last block, and the terms of the head."""
        x = self.norm(x)
        if self.config.logits_divisor != 1.0:
            x = x / self.config.logits_divisor
        logits = self.head(x, self.embedding.weight if self.config.tie_embeddings else None)[0]
        return self.from_logits(logits, labels, with_terms)

    def from_logits(self, logits: Tensor, labels: Tensor | None, with_terms: bool = False) -> tuple[Tensor, Terms]:
        """Returns what `read_out` does, from the logits [T, V_local] of this rank."""
        if labels is not None:
            if not (with_terms or torch.is_grad_enabled() or torch.compiler.is_compiling()):
                return losses_by_rows(logits, labels, self.config.vocab_size, self.groups), {}
            logits = without_padding(logits, self.config.vocab_size, self.groups)
            # Under tensor parallelism, Megatron-core's loss overwrites the logits, so this comes first.
            terms = {Z_LOSS: squared_log_z(logits, labels, self.groups)} if with_terms and Z_LOSS in self.terms else {}
            return token_losses(logits, labels, self.groups), terms
        if self.groups.tensor_size > 1:
            logits = gather_vocabulary(logits, self.groups)
        return logits[:, : self.config.vocab_size], {}

    def compile_parts(self, backend: str = "inductor", within_hooks: bool = False) -> None:
        """Compiles each block (one graph serves all layers of a mixer) and `read_out`, which includes the loss.

        within_hooks: compiles only what runs between the forward hooks of blocks, and of `read_out` only `from_logits`.
        ZeRO-3 gathers and frees weights in these hooks. Compiled code does not call them.
        """
        if within_hooks:
            for block in self.blocks:
                block.forward = torch.compile(block.forward, backend=backend)
            # A method of this object alone is replaced, as `read_out` is below; mypy forbids that in general.
            self.from_logits = torch.compile(self.from_logits, backend=backend)  # type: ignore[method-assign]
            return
        # Inductor's checks of its arguments and of the results of operators take time of the host at each call.
        options = {"size_asserts": False} if backend == "inductor" else None
        for block in self.blocks:
            block.compile(backend=backend, options=options)
        self.read_out = torch.compile(self.read_out, backend=backend)  # type: ignore[method-assign]
