"""The registered operators: rotation, factor and attention in one, so that nothing is split, copied or joined.

Forward rotates q and k out of qkv, keeps them for the backward pass and attends. In the backward pass attention
writes dv into its place in dqkv, the rotation kernel writes dq and dk beside it, and autograd has nothing to add up.
"""

import torch
from torch import Tensor

from ..exact import lse_dtype
from ..softmax import backends
from ..softmax.documents import Documents
from ..versions import mark
from . import rotary
from .reference import query_factor, rotate

mark(__file__)


@torch.library.custom_op("rotary_attention::forward", mutates_args=())
def forward_op(
    qkv: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    log_n: Tensor | None,
    s: Tensor | None,
    b: Tensor | None,
    cu_seqlens: Tensor,
    num_heads: int,
    max_seqlen: int,
    uniform_length: int | None,
    scale: float,
    window: int | None,
    deterministic: bool,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`rotary_attention` without its checks and defaults.

    Returns o [T, N, H], and for the backward pass lse [T, N] (float32, or float64 for float64) and the rotated q [T,
    N, H], times its factor, and k [T, K, H], both in the dtype of qkv. Raises ValueError for a backend that cannot
    run and, on the CPU, for cu_seqlens that do not ascend from 0 to T.
    """
    num_kv_heads = (qkv.shape[1] - num_heads) // 2
    if qkv.device.type == "cuda":
        q, k = rotary.forward(qkv, num_heads, cos, sin, log_n, s, b)
    else:
        q, k = qkv.narrow(1, 0, num_heads), qkv.narrow(1, num_heads, num_kv_heads)
        q, k = rotate(q, cos, sin, query_factor(log_n, s, b)), rotate(k, cos, sin)
        # Without a rotation these are views of qkv, and an operator must not return views of its inputs.
        q, k = (x.clone(memory_format=torch.contiguous_format) for x in (q, k))
    v = qkv.narrow(1, num_heads + num_kv_heads, num_kv_heads)
    documents = Documents(cu_seqlens, max_seqlen, uniform_length, scale, window, deterministic, backend)
    return *backends.forward(q, k, v, documents), q, k


@torch.library.custom_op("rotary_attention::backward", mutates_args=())
def backward_op(
    grad_o: Tensor,
    qkv: Tensor,
    o: Tensor,
    lse: Tensor,
    q: Tensor,
    k: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    log_n: Tensor | None,
    s: Tensor | None,
    b: Tensor | None,
    cu_seqlens: Tensor,
    max_seqlen: int,
    uniform_length: int | None,
    scale: float,
    window: int | None,
    deterministic: bool,
    backend: str,
    factor_grads: bool,
    log_n_grad: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """dqkv [T, N + 2K, H], and the gradients of log_n [T], s [N] and b [N].

    grad_o [T, N, H]. o, lse, q, k: what `forward_op` returned for the same other arguments.
    factor_grads: whether those of s and b are wanted; log_n_grad: whether that of log_n is. A gradient that is not
    wanted is empty.
    """
    num_heads, num_kv_heads = q.shape[1], k.shape[1]
    dqkv = torch.empty(qkv.shape, dtype=qkv.dtype, device=qkv.device)
    v, dv = (x.narrow(1, num_heads + num_kv_heads, num_kv_heads) for x in (qkv, dqkv))
    documents = Documents(cu_seqlens, max_seqlen, uniform_length, scale, window, deterministic, backend)
    dq, dk = backends.backward(grad_o, q, k, v, o, lse, documents, dv)
    if qkv.device.type == "cuda":
        return dqkv, *rotary.backward(dq, dk, qkv, dqkv, cos, sin, log_n, s, b, factor_grads, log_n_grad)
    return dqkv, *_rotate_back(dq, dk, qkv, dqkv, cos, sin, log_n, s, b, factor_grads, log_n_grad)


def _rotate_back(
    dq: Tensor,
    dk: Tensor,
    qkv: Tensor,
    dqkv: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    log_n: Tensor | None,
    s: Tensor | None,
    b: Tensor | None,
    factor_grads: bool,
    log_n_grad: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """`rotary.backward` in plain torch."""
    num_heads, num_kv_heads = dq.shape[1], dk.shape[1]
    wide = lse_dtype(qkv)
    minus_sin = None if sin is None else -sin  # the inverse rotation
    du = rotate(dq.to(wide), cos, minus_sin)
    dqkv[:, num_heads : num_heads + num_kv_heads] = rotate(dk.to(wide), cos, minus_sin)
    factor = query_factor(log_n, s, b)
    dqkv[:, :num_heads] = du if factor is None else du * factor[..., None]
    dlog_n, ds, db = (qkv.new_empty(0, dtype=torch.float32 if x is None else x.dtype) for x in (log_n, s, b))
    if log_n is not None and s is not None and (factor_grads or log_n_grad):
        d_factor = (du * qkv[:, :num_heads].to(wide)).sum(2)  # [T, N]
        ds, db = (d_factor * log_n[:, None]).sum(0).to(ds.dtype), d_factor.sum(0).to(db.dtype)
        if log_n_grad:
            dlog_n = (d_factor * s.to(wide)).sum(1).to(dlog_n.dtype)
    return dlog_n, ds, db


@forward_op.register_fake
def _(qkv, cos, sin, log_n, s, b, cu_seqlens, num_heads, *_):  # type: ignore[no-untyped-def]
    num_tokens, heads, head_dim = qkv.shape
    q = qkv.new_empty(num_tokens, num_heads, head_dim)
    k = qkv.new_empty(num_tokens, (heads - num_heads) // 2, head_dim)
    return torch.empty_like(q), q.new_empty(q.shape[:2], dtype=lse_dtype(q)), q, k


@backward_op.register_fake
def _(grad_o, qkv, o, lse, q, k, cos, sin, log_n, s, b, *others):  # type: ignore[no-untyped-def]
    *_, factor_grads, log_n_grad = others
    num_heads = q.shape[1] if factor_grads or log_n_grad else 0
    sizes = (qkv.shape[0] if log_n_grad else 0, num_heads, num_heads)
    types = (torch.float32 if x is None else x.dtype for x in (log_n, s, b))
    return qkv.new_empty(qkv.shape), *(qkv.new_empty(size, dtype=dtype) for size, dtype in zip(sizes, types))


def _setup_context(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    qkv, cos, sin, log_n, s, b, cu_seqlens, _, *ctx.options = inputs
    o, lse, q, k = output
    ctx.save_for_backward(qkv, o, lse, q, k, cos, sin, log_n, s, b, cu_seqlens)
    ctx.set_materialize_grads(False)  # zeros as gradients of the unused outputs would be as large as these
    ctx.mark_non_differentiable(lse, q, k)
    ctx.wanted = [x is not None and x.requires_grad for x in (log_n, s, b)]


def _backward(ctx, grad_o, *_unused):  # type: ignore[no-untyped-def]
    log_n_grad, *factor_grads = ctx.wanted
    dqkv, *grads = backward_op(grad_o, *ctx.saved_tensors, *ctx.options, any(factor_grads), log_n_grad)
    dlog_n, ds, db = (grad if wanted else None for grad, wanted in zip(grads, ctx.wanted))
    return dqkv, None, None, dlog_n, ds, db, *(None,) * 8


forward_op.register_autograd(_backward, setup_context=_setup_context)
