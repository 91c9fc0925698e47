"""FlexAttention (torch.nn.attention.flex_attention) on packed documents: softmax attention with a bias of the positions.

What FlexAttention needs is a mask of blocks, made once a batch from the documents' bounds (no [T, T] is ever built), and a
`score_mod` that adds the bias to one logit. Biases are functions of positions within documents; queries and keys of one
document lie equally far apart in the packed row, so i − j is q_idx − kv_idx.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

BLOCK = 128

ScoreMod = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


def document_mask(positions: Tensor, window: int | None = None) -> BlockMask:
    """The causal mask of packed documents, within `window` keys where given.

    positions: [T], each token's within its document. A block of 128 queries sees one run of blocks of keys, from that of its
    first query's first key to its own; those of which every query sees every key are told apart, as they need no mask.
    """
    num_tokens = len(positions)
    index = torch.arange(num_tokens, device=positions.device, dtype=torch.int32)
    first_key = index - positions
    if window is not None:
        first_key = torch.maximum(first_key, index - (window - 1))

    def mask_mod(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return (kv_idx <= q_idx) & (kv_idx >= first_key[q_idx])

    num_blocks = -(-num_tokens // BLOCK)
    block = torch.arange(num_blocks, device=positions.device)
    last_query = (block * BLOCK + BLOCK - 1).clamp(max=num_tokens - 1)
    # first_key never falls from one token to the next: a block's reach is its first query's, its common part its last's.
    seen = (block <= block[:, None]) & (block >= (first_key[block * BLOCK] // BLOCK)[:, None])
    full = (block < block[:, None]) & (block * BLOCK >= first_key[last_query][:, None])
    return BlockMask.from_kv_blocks(
        *_listed(seen & ~full),
        *_listed(full),
        BLOCK_SIZE=BLOCK,
        mask_mod=mask_mod,
        seq_lengths=(num_tokens, num_tokens),
    )


def _listed(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """[queries, keys] bool → how many blocks each row has, and which, the rest of the row behind them."""
    count = blocks.sum(-1, dtype=torch.int32)
    order = blocks.to(torch.int8).argsort(dim=-1, descending=True, stable=True).to(torch.int32)
    return count[None, None], order[None, None]


def biased_attention(
    q: Tensor, k: Tensor, v: Tensor, *, score_mod: ScoreMod, block_mask: BlockMask, scale: float | None = None
) -> Tensor:
    """softmax(scale · q·k + bias) v. q: [T, N, H]; k, v: [T, K, H]; scale: 1 / sqrt(H) where None. Returns [T, N, H]."""
    run = _compiled() if q.is_cuda else flex_attention
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    gqa = q.shape[1] != k.shape[1]
    # Left to itself it takes a decoding kernel for fewer than 128 queries, which in float32 has no configuration that fits.
    options = {"BACKEND": "TRITON"} if q.is_cuda else None
    out = run(q, k, v, score_mod=score_mod, block_mask=block_mask, scale=scale, enable_gqa=gqa, kernel_options=options)
    return out[0].transpose(0, 1)


@functools.cache
def _compiled() -> Any:
    # Training has one shape. Evaluation has many: from the second on, one kernel serves them all.
    return torch.compile(flex_attention)


def linear_bias(slopes: Tensor) -> ScoreMod:
    """−slopes[h] · (i − j)"""

    def score_mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return score - slopes[h] * (q_idx - kv_idx)

    return score_mod


def mlp_bias(reach: Tensor, norm: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor) -> ScoreMod:
    """w2[h] · relu(w1 · x + b1) + b2[h] with x = reach[i − j] / norm[q_idx], computed where the logit is. No gradient.

    reach, norm: [T], the numerator by distance and the denominator by token. w1, b1: [M]; w2: [N, M]; b2: [N].
    """
    hidden = len(w1)

    def score_mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        x = reach[(q_idx - kv_idx).abs()] / norm[q_idx]
        zero = h * 0  # captured tensors are indexed by tensors
        bias = b2[h]
        for unit in range(hidden):
            at = zero + unit
            bias = bias + w2[h, at] * (w1[at] * x + b1[at]).relu()
        return score + bias

    return score_mod


def table_bias(table: Tensor, positions: Tensor) -> ScoreMod:
    """table[h, i, j], differentiable: backward adds into one entry for every document, in no fixed order.

    table: [N, L, L] for documents of at most L tokens. positions: [T].
    """

    def score_mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return score + table[h, positions[q_idx], positions[kv_idx]]

    return score_mod


@torch.compiler.disable  # a compiled block's graph breaks here; FlexAttention inside is compiled by itself
def table_attention(
    table: Callable[..., Tensor],
    weights: tuple[Tensor, ...],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    positions: Tensor,
    longest: int,
    *,
    block_mask: BlockMask,
    scale: float | None = None,
) -> Tensor:
    """`biased_attention` with table(i [longest], *weights) → [N, longest, longest]; backward keeps the weights only."""

    def run(q: Tensor, k: Tensor, v: Tensor, *weights: Tensor) -> Tensor:
        made = table(torch.arange(longest, device=q.device), *weights)
        return biased_attention(q, k, v, score_mod=table_bias(made, positions), block_mask=block_mask, scale=scale)

    found: Tensor = _Recomputed.apply(run, q, k, v, *weights)
    return found


class _Recomputed(torch.autograd.Function):
    """run(*tensors), of which only the tensors are kept.

    Not torch.utils.checkpoint: around FlexAttention it returns wrong gradients of captured tensors without a word.
    """

    @staticmethod
    def forward(ctx: Any, run: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
        ctx.run = run
        ctx.save_for_backward(*tensors)
        return run(*tensors)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        tensors = [x.detach().requires_grad_(x.requires_grad) for x in ctx.saved_tensors]
        wanted = [x for x in tensors if x.requires_grad]
        with torch.enable_grad():
            found = iter(torch.autograd.grad(ctx.run(*tensors), wanted, gradient))
        return (None, *(next(found) if x.requires_grad else None for x in tensors))
