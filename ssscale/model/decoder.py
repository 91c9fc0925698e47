"""The decoder, top to bottom: norm, MLP, attention, block, embedding, head and loss.

Shapes: T tokens of packed documents (no padding), D hidden size, N query heads and K key/value heads of H dimensions on this
tensor-parallel rank, V entries of the vocabulary. Under sequence parallelism the residual stream is [T / tensor_size, D].
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ssscale.config.schema import ModelConfig, Recompute
from ssscale.layout import PackedLayout
from ssscale.model.mixers.base import Tables
from ssscale.model.recompute import keep_products, leave_products_whole
from ssscale.model.weight import Weight
from ssscale.parallel.groups import Groups
from ssscale.parallel.megatron import (
    TransformerConfig,
    column_linear,
    gather_vocabulary,
    global_shape,
    log_normalizer,
    mark_split,
    megatron_config,
    replicated,
    row_linear,
    vocabulary_cross_entropy,
    vocabulary_embedding,
)

if TYPE_CHECKING:
    from ssscale.model.cache import KVCache, LayerCache

VOCAB_WEIGHTS = ("embedding.weight", "head.weight")  # the weights with a row for each entry of the vocabulary
VOCAB_MULTIPLE = 128  # tensor cores want aligned matrices; each tensor-parallel rank holds a multiple of this
IGNORE = -100  # the label of a token without a target: the last one of a document
Z_LOSS = "z_loss"

Terms = dict[str, Tensor]  # what joins the loss or is logged beside it: float32 scalars, sums over this rank's tokens


class RMSNorm(nn.Module):
    """y = x / sqrt(mean(x²) + ε) · w over the last dimension   (arXiv:1910.07467, Eq. 4)

    partial: each tensor-parallel rank sees a part of the tokens (sequence parallelism), so w's gradient is summed over them.
    """

    def __init__(self, size: int, eps: float, groups: Groups, partial: bool) -> None:
        super().__init__()
        self.eps, self.groups, self.partial = eps, groups, partial
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        weight = replicated(self.weight, self.groups) if self.partial else self.weight
        return F.rms_norm(x, (x.shape[-1],), weight, self.eps)


class SwiGLU(nn.Module):
    """y = W_down (silu(W_gate x) ⊙ W_up x)   (arXiv:2002.05202, Eq. 6). [T, D] → [T, D]."""

    def __init__(self, config: ModelConfig, megatron: TransformerConfig) -> None:
        super().__init__()
        size, inner = config.hidden_size, config.ffn_hidden_size
        self.gate_up = column_linear(size, (inner, inner), megatron)
        self.down = row_linear(inner, size, megatron)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x)[0].chunk(2, -1)
        return self.down(F.silu(gate) * up)[0]


class Weights(nn.Module):
    """This rank's part of the learned tensors that a mixer or a position method declares, each at its start value."""

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
        """For use on this rank's heads; the gradient of what every rank has is summed over them."""
        weight: Tensor = getattr(self, name)
        return replicated(weight, self.groups) if self.declared[name].split is None else weight

    def all(self) -> dict[str, Tensor]:
        return {name: self.take(name) for name in self.declared}


class Attention(nn.Module):
    """y = W_o mix(W_q x, W_k x, W_v x), grouped-query (arXiv:2305.13245). [T, D] → [T, D].

    What lies between the projections is the layer's mixer (ssscale/model/mixers), which reads what it needs from here.
    """

    def __init__(self, config: ModelConfig, groups: Groups, megatron: TransformerConfig, layer: int) -> None:
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
        self.weights = Weights(self.mixer.weights(config), groups)
        self.position_weights = Weights(self.position.weights(config), groups)

    def forward(
        self, x: Tensor, layout: PackedLayout, tables: Tables, cache: "LayerCache | None" = None
    ) -> tuple[Tensor, Terms]:
        qkv = self.qkv(x)[0].unflatten(-1, (-1, self.head_size))  # [T, N + 2K, H]
        extend = None if cache is None else cache.extend
        mixed = self.mixer.mix(qkv, self, layout, tables, extend)  # [T, N, H]
        terms = self.mixer.measure(qkv, mixed, self, layout) if self.mixer.terms else {}
        return self.out(mixed.flatten(1))[0], terms

    def for_heads(self, weight: Tensor, count: int) -> Tensor:
        """The part of a tensor [N, ...] for the `count` heads that q has in `attend`: under Ulysses a rank's share of them."""
        return weight if count == len(weight) else weight.narrow(0, self.groups.ulysses_rank * count, count)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, layout: PackedLayout) -> Tensor:
        """`Mixer.attend` of this layer. Whoever watches what goes into it replaces this method of the instance."""
        return self.mixer.attend(q, k, v, self, layout)


class Block(nn.Module):
    """h = x + m · attention(norm(x)); y = h + m · mlp(norm(h))   (pre-norm, as Llama 2; m = 1 but for the width transfer)

    `selective` recomputation is a part of the block, and so of its compiled graph; `full` is around it.
    """

    def __init__(
        self, config: ModelConfig, groups: Groups, megatron: TransformerConfig, layer: int, recompute: Recompute
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
        self, x: Tensor, layout: PackedLayout, tables: Tables, cache: "LayerCache | None" = None
    ) -> tuple[Tensor, Terms]:
        if self.selective and cache is None and torch.is_grad_enabled():
            return keep_products(self.attention.mixer.kept_operators, self._layer, x, layout, tables)
        return self._layer(x, layout, tables, cache)

    def _layer(
        self, x: Tensor, layout: PackedLayout, tables: Tables, cache: "LayerCache | None" = None
    ) -> tuple[Tensor, Terms]:
        attended, terms = self.attention(self.attention_norm(x), layout, tables, cache)
        x = x + self._scaled(attended)
        return x + self._scaled(self.mlp(self.mlp_norm(x))), terms

    def _scaled(self, branch: Tensor) -> Tensor:
        return branch if self.multiplier == 1.0 else branch * self.multiplier


def padded_vocab(vocab_size: int, tensor_size: int) -> int:
    """Rows of the embedding: the vocabulary rounded up to a multiple of VOCAB_MULTIPLE on each rank."""
    multiple = VOCAB_MULTIPLE * tensor_size
    return -(-vocab_size // multiple) * multiple


class Decoder(nn.Module):
    """A Llama-2-style decoder (arXiv:2307.09288, Section 2.2) over packed documents.

    length: the training length (the p_n study has one p per position). terms: name → weight in the loss, 0 for what is only
    logged: the z-loss where `z_loss` is its weight, and what the mixers declare (`Mixer.terms`).
    Rows of the embedding and the head beyond `vocab_size` are padding: they get no probability and no gradient.
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
    ) -> None:
        super().__init__()
        self.config, self.groups, self.recompute = config, groups, recompute
        self.terms: dict[str, float] = {Z_LOSS: z_loss} if z_loss else {}
        for mixer in config.used.values():
            self.terms |= mixer.terms
        megatron = megatron_config(groups, sequence_parallel, dtype)
        self.sequence_parallel = megatron.sequence_parallel
        rows = padded_vocab(config.vocab_size, groups.tensor_size)
        self.mixers = config.used
        shared = {name: mixer.shared_weights(config, length) for name, mixer in self.mixers.items()}
        self.shared = nn.ModuleDict({name: Weights(found, groups) for name, found in shared.items() if found})
        self.embedding = vocabulary_embedding(rows, config.hidden_size, megatron)
        layers = range(config.num_layers)
        self.blocks = nn.ModuleList(Block(config, groups, megatron, layer, recompute) for layer in layers)
        self.norm = RMSNorm(config.hidden_size, config.norm_eps, groups, self.sequence_parallel)
        self.head = column_linear(config.hidden_size, (rows,), megatron, own_weight=not config.tie_embeddings)
        self.to(dtype)
        if recompute == Recompute.selective:
            leave_products_whole(self)

    def num_parameters(self) -> int:
        """Parameters of the whole model, padding left out (local sizes times the tensor-parallel size where split)."""
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
        """Losses [T] float32 in nats where labels are given, else logits [T, vocab_size]; with_terms: and `terms`.

        A term is a sum over this rank's tokens and over all layers, the same on all tensor-parallel ranks.

        tokens, labels: [T] int64, the same on every tensor-parallel rank; under sequence parallelism T is a multiple of
        their number. cache: of earlier tokens, which laid this pass out (`KVCache.begin`). rows: only the losses or logits of
        these tokens, int64 numbers below T, so that the head computes no others.
        """
        x = self._embed(tokens)
        if cache is None:
            layout = self.config.place.lay_out(layout, self.config.position.window)
        tables = self._tables(layout)
        whole = cache is None and self.recompute == Recompute.full and torch.is_grad_enabled()
        caches = [None] * len(self.blocks) if cache is None else cache.layers()
        terms = {name: torch.zeros((), device=x.device) for name in self.terms}
        for block, part in zip(self.blocks, caches, strict=True):
            own = tables[block.attention.mixer.name]
            if whole:
                x, found = checkpoint(block, x, layout, own, use_reentrant=False)
            else:
                x, found = block(x, layout, own, part)
            terms |= {name: terms[name] + term for name, term in found.items()}
        late = rows is not None and self.sequence_parallel  # the head gathers the tokens: their rows are known after it
        if rows is not None and not late:
            x, labels = x[rows], None if labels is None else labels[rows]
        out, found = self.read_out(x, labels, with_terms)
        out = out[rows] if late else out
        return (out, terms | found) if with_terms else out

    def _embed(self, tokens: Tensor) -> Tensor:
        # Megatron's embedding scatters [batch, sequence, hidden] over the sequence, which it puts first.
        x = self.embedding(tokens[None]).squeeze(1 if self.sequence_parallel else 0)
        multiplier = self.config.width.embedding_multiplier
        return x if multiplier == 1.0 else x * multiplier

    def _tables(self, layout: PackedLayout) -> dict[str, Tables]:
        """What the layers of each mixer share of a batch."""
        config, window = self.config, self.config.position.window
        rotation = config.place.rotation(config.head_size, layout)
        found = {}
        for name, mixer in self.mixers.items():
            shared = self.shared[name] if name in self.shared else None  # noqa: SIM401 - ModuleDict has no get
            turned = rotation if config.place_of(mixer) is config.place else None
            found[name] = Tables(turned, mixer.prepare(layout, window, shared))
        return found

    def read_out(self, x: Tensor, labels: Tensor | None, with_terms: bool = False) -> tuple[Tensor, Terms]:
        """Losses [T] or logits [T, vocab_size] from the last block's output, and the head's terms."""
        x = self.norm(x)
        if self.config.logits_divisor != 1.0:
            x = x / self.config.logits_divisor
        logits = self.head(x, self.embedding.weight if self.config.tie_embeddings else None)[0]
        if labels is not None:
            logits = without_padding(logits, self.config.vocab_size, self.groups)
            # Before the losses, which overwrite the logits.
            terms = {Z_LOSS: squared_log_z(logits, labels, self.groups)} if with_terms and Z_LOSS in self.terms else {}
            return token_losses(logits, labels, self.groups), terms
        if self.groups.tensor_size > 1:
            logits = gather_vocabulary(logits, self.groups)
        return logits[:, : self.config.vocab_size], {}

    def compile_parts(self, backend: str = "inductor") -> None:
        """torch.compile each block (one graph serves all layers of a mixer) and the read-out with its loss."""
        for block in self.blocks:
            block.compile(backend=backend)
        self.read_out = torch.compile(self.read_out, backend=backend)  # type: ignore[method-assign]


def without_padding(logits: Tensor, vocab_size: int, groups: Groups) -> Tensor:
    """Logits [T, V_local] in float32 with no probability where the padded vocabulary has no entries."""
    logits = logits.float()
    first = groups.tensor_rank * logits.shape[-1]
    if vocab_size < logits.shape[-1] * groups.tensor_size:
        column = torch.arange(first, first + logits.shape[-1], device=logits.device)
        logits = logits.masked_fill(column >= vocab_size, torch.finfo(torch.float32).min)
    return logits


def squared_log_z(logits: Tensor, labels: Tensor, groups: Groups) -> Tensor:
    """Σ ln²Z over the tokens with a target, Z = Σ exp(logits)   (the z-loss of arXiv:2204.02311, Section 5). A scalar."""
    log_z = logits.logsumexp(-1) if groups.tensor_size == 1 else log_normalizer(logits, groups)
    return (log_z.square() * (labels != IGNORE)).sum()


def token_losses(logits: Tensor, labels: Tensor, groups: Groups) -> Tensor:
    """−log p(label) in nats, 0 where the label is IGNORE.

    logits: [T, V_local] float32, this rank's part of `without_padding`; labels: [T] int64. Returns [T] float32.
    """
    if groups.tensor_size == 1:
        return F.cross_entropy(logits, labels, ignore_index=IGNORE, reduction="none")
    losses = vocabulary_cross_entropy(logits, labels.clamp(min=0))
    return losses * (labels != IGNORE)
