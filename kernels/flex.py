"""FlexAttention (torch.nn.attention.flex_attention) on packed documents: softmax attention with a position bias.

FlexAttention takes a block mask, which is built once per batch from the bounds of the documents (never from a [T, T]
mask), and a `score_mod`, which adds the bias to one logit. A bias is a function of the positions i and j within a
document. Packing keeps the distances within a document, so i − j is q_idx − kv_idx, the difference of the token
indices.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from .graph_breaks import breaks_graph

BLOCK = 128

# score_mod(score, batch, head, q_idx, kv_idx) → the changed score; FlexAttention's signature.
ScoreMod = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


def document_mask(positions: Tensor, window: int | None = None) -> BlockMask:
    """The mask i − window < j ≤ i within each document; window None: all j ≤ i.

    positions [T] integer: of each token within its document. The queries of a block of 128 tokens see the key blocks
    from the one with the first key of its first query up to its own. FlexAttention needs to mask only those of these
    blocks in which some query does not see some key; `full` marks the others.
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
    # first_key never decreases along the tokens, so the first query of a block reaches farthest and its last one least.
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
    """bool [query blocks, key blocks] → how many key blocks each query block has, and all indices, those first."""
    count = blocks.sum(-1, dtype=torch.int32)
    order = blocks.to(torch.int8).argsort(dim=-1, descending=True, stable=True).to(torch.int32)
    return count[None, None], order[None, None]


def biased_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    score_mod: ScoreMod,
    block_mask: BlockMask,
    scale: float | None = None,
    loads: bool = False,
) -> Tensor:
    """o_i = Σ_j softmax_j(score_mod(scale · q_i·k_j)) v_j over the keys j that `block_mask` shows to query i.

    q [T, N, H]; k, v [T, K, H] with N a multiple of K; scale: None for 1/√H. loads: whether score_mod loads a number for
    each logit. Returns o [T, N, H] in the dtype of q. On a GPU the first call of each kind compiles.
    """
    run = _compiled() if q.is_cuda else flex_attention
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    gqa = q.shape[1] != k.shape[1]
    # For fewer than 128 queries FlexAttention chooses a decoding kernel, none of whose configurations fits in float32.
    options = {"BACKEND": "TRITON"} | (_tiles(q) if loads else {}) if q.is_cuda else None
    out = run(q, k, v, score_mod=score_mod, block_mask=block_mask, scale=scale, enable_gqa=gqa, kernel_options=options)
    return out[0].transpose(0, 1)


def _tiles(q: Tensor) -> dict[str, int]:
    """What forward needs if it loads a number for each logit.

    These numbers lie in shared memory beside k and v. For 64 dims FlexAttention's own tiles, of 128 keys in 3 stages, then
    need 240 KiB, and an H100 has 227. Its tiles for other dims fit.
    """
    return {"fwd_BLOCK_M": 128, "fwd_BLOCK_N": 64, "fwd_num_stages": 2} if (q.shape[-1], q.itemsize) == (64, 2) else {}


@functools.cache
def _compiled() -> Any:
    # Training has one shape. Evaluation has many, and from the second one on a single kernel serves all of them.
    return torch.compile(flex_attention)


def linear_bias(slopes: Tensor) -> ScoreMod:
    """ALiBi (arXiv:2108.12409): −slopes[h] · (i − j), with slopes [N]."""

    def score_mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return score - slopes[h] * (q_idx - kv_idx)

    return score_mod


def mlp_bias(reach: Tensor, norm: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor) -> ScoreMod:
    """FIRE (arXiv:2310.04418): w2[h] · relu(w1 · x + b1) + b2[h] with x = reach[i − j] / norm[q_idx]. No gradient.

    reach [T]: the numerator by distance. norm [T]: the denominator by token index. w1, b1 [M]; w2 [N, M]; b2 [N].
    Each logit's bias is computed inside the kernel, so that no table of biases is stored.
    """
    hidden = len(w1)

    def score_mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        x = reach[(q_idx - kv_idx).abs()] / norm[q_idx]
        zero = h * 0  # FlexAttention indexes captured tensors by tensors only
        bias = b2[h]
        for unit in range(hidden):
            at = zero + unit
            bias = bias + w2[h, at] * (w1[at] * x + b1[at]).relu()
        return score + bias

    return score_mod


def table_bias(table: Tensor, positions: Tensor) -> ScoreMod:
    """table[h, i, j], differentiable.

    table [N, L, L] for documents of at most L tokens; positions [T]. All documents share an entry, so backward adds
    their gradients into it by atomics, and not in the same order in every run.

    The entry of a key is its token index plus a number of its query, so that the entries of neighbouring keys are
    neighbours too, which is what makes reading them fast (docs/log/2026-11-28-fire.md).
    """
    entries, first = table_entries(table, positions)

    def score_mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return score + entries[h, first[q_idx] + kv_idx]

    return score_mod


def table_entries(table: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Returns `entries` [N, ·] and `first` [T] with table[h, i, j] = entries[h, first[q] + k] for q and k of one document.

    FlexAttention reads entries of hidden keys too: those of all keys in the blocks that some query of a block sees. They lie
    up to L + 2 · BLOCK before the row of their query and up to BLOCK behind it, where `entries` has zeros.
    """
    heads, length, _ = table.shape
    entries = torch.nn.functional.pad(table.reshape(heads, length * length), (length + 2 * BLOCK, BLOCK))
    index = torch.arange(len(positions), device=positions.device)
    first = length + 2 * BLOCK + positions.long() * (length + 1) - index
    return entries, first.int() if entries.shape[1] < 2**31 else first


@breaks_graph  # FlexAttention is compiled on its own
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
    """`biased_attention` with the bias table(i, *weights) [N, longest, longest], for i the positions 0 to longest − 1.

    positions [T], longest: the most tokens of a document. The backward pass computes the table again from the
    weights, so that no layer keeps its table.
    """

    def run(q: Tensor, k: Tensor, v: Tensor, *weights: Tensor) -> Tensor:
        made = table(torch.arange(longest, device=q.device), *weights)
        score_mod = table_bias(made, positions)
        return biased_attention(q, k, v, score_mod=score_mod, block_mask=block_mask, scale=scale, loads=True)

    found: Tensor = _Recomputed.apply(run, q, k, v, *weights)
    return found


class _Recomputed(torch.autograd.Function):
    """run(*tensors), which keeps only the tensors for the backward pass.

    torch.utils.checkpoint around FlexAttention returns wrong gradients of captured tensors, without an error.
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
