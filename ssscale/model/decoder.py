"""The decoder: embedding, blocks, norm, head."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ssscale.attention.ssmax import query_base
from ssscale.config.schema import Core, ModelConfig, Recompute, SSMaxVariant
from ssscale.layout import PackedLayout
from ssscale.model.block import Block
from ssscale.model.loss import token_losses
from ssscale.model.norm import RMSNorm
from ssscale.model.recompute import leave_products_whole
from ssscale.parallel.groups import Groups
from ssscale.parallel.megatron import (
    column_linear,
    gather_vocabulary,
    global_shape,
    megatron_config,
    replicated,
    vocabulary_embedding,
)
from ssscale.position import Tables, position_tables, with_block_mask

if TYPE_CHECKING:
    from ssscale.model.cache import KVCache

VOCAB_WEIGHTS = ("embedding.weight", "head.weight")  # the weights with a row for each entry of the vocabulary
VOCAB_MULTIPLE = 128  # tensor cores want aligned matrices; each tensor-parallel rank holds a multiple of this


def padded_vocab(vocab_size: int, tensor_size: int) -> int:
    """Rows of the embedding: the vocabulary rounded up to a multiple of VOCAB_MULTIPLE on each rank."""
    multiple = VOCAB_MULTIPLE * tensor_size
    return -(-vocab_size // multiple) * multiple


class Decoder(nn.Module):
    """A Llama-2-style decoder (arXiv:2307.09288, Section 2.2) over packed documents.

    length: the training length (the p_n study has one p per position). Rows of the embedding and the head beyond
    `vocab_size` are padding: they get no probability and no gradient.
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
    ) -> None:
        super().__init__()
        self.config, self.groups, self.recompute = config, groups, recompute
        megatron = megatron_config(groups, sequence_parallel, dtype)
        self.sequence_parallel = megatron.sequence_parallel
        rows = padded_vocab(config.vocab_size, groups.tensor_size)
        self.embedding = vocabulary_embedding(rows, config.hidden_size, megatron)
        self.pn: nn.Parameter | None = None
        if config.attention.core == Core.ssmax and config.attention.ssmax == SSMaxVariant.pn:
            self.pn = nn.Parameter(torch.ones(length))
        self.blocks = nn.ModuleList(Block(config, groups, megatron, recompute) for _ in range(config.num_layers))
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
    ) -> Tensor:
        """Losses [T] float32 in nats where labels are given, else logits [T, vocab_size].

        tokens, labels: [T] int64, the same on every tensor-parallel rank; under sequence parallelism T is a multiple of
        their number. cache: of earlier tokens, which laid this pass out (`KVCache.begin`). rows: only the losses or logits of
        these tokens, int64 numbers below T, so that the head computes no others.
        """
        x = self._embed(tokens)
        tables = self._tables(layout)
        if cache is None:
            layout = with_block_mask(self.config, layout)
            whole = self.recompute == Recompute.full and torch.is_grad_enabled()
            for block in self.blocks:
                x = checkpoint(block, x, layout, tables, use_reentrant=False) if whole else block(x, layout, tables)
        else:
            for block, part in zip(self.blocks, cache.layers(), strict=True):
                x = block(x, layout, tables, part)
        if rows is None:
            return self.read_out(x, labels)
        # Under sequence parallelism the head gathers the tokens, and the rows are only known behind it.
        if self.sequence_parallel:
            return self.read_out(x, labels)[rows]
        return self.read_out(x[rows], None if labels is None else labels[rows])

    def read_out(self, x: Tensor, labels: Tensor | None) -> Tensor:
        """Losses [T] or logits [T, vocab_size] from the last block's output."""
        x = self.norm(x)
        if self.config.logits_divisor != 1.0:
            x = x / self.config.logits_divisor
        logits = self.head(x, self.embedding.weight if self.config.tie_embeddings else None)[0]
        if labels is not None:
            return token_losses(logits, labels, self.config.vocab_size, self.groups)
        if self.groups.tensor_size > 1:
            logits = gather_vocabulary(logits, self.groups)
        return logits[:, : self.config.vocab_size]

    def _tables(self, layout: PackedLayout) -> Tables:
        """What all layers share of a batch."""
        tables = position_tables(self.config, layout)
        if self.config.attention.core != Core.ssmax:
            return tables
        pn = None if self.pn is None else replicated(self.pn, self.groups)
        return tables._replace(base=query_base(layout, self.config.position.window, pn))

    def _embed(self, tokens: Tensor) -> Tensor:
        # Megatron's embedding scatters [batch, sequence, hidden] over the sequence, which it puts first.
        x = self.embedding(tokens[None]).squeeze(1 if self.sequence_parallel else 0)
        multiplier = self.config.width.embedding_multiplier
        return x if multiplier == 1.0 else x * multiplier

    def compile_parts(self, backend: str = "inductor") -> None:
        """torch.compile each block (one graph serves all of them) and the read-out with its loss."""
        for block in self.blocks:
            block.compile(backend=backend)
        self.read_out = torch.compile(self.read_out, backend=backend)  # type: ignore[method-assign]
