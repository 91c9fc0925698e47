"""The registered operators: rotation, factor and attention as one, so that q, k and v are never split, copied or joined.

forward: qkv → rotated q and k (kept for backward) → o. backward: attention writes dv into its place in dqkv, the rotation
kernel writes dq and dk beside it, and autograd has nothing to add up.
"""

import torch
from torch import Tensor

from ..exact import lse_dtype
from ..softmax import backends
from ..softmax.documents import Documents
from . import rotary
from .reference import query_factor, rotate


@torch.library.custom_op("rotary_attention::forward", mutates_args=())
def forward_op(
    qkv: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    base: Tensor | None,
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
    """o [T, N, H], and for backward lse [T, N] and the rotated q [T, N, H] and k [T, K, H]."""
    num_kv_heads = (qkv.shape[1] - num_heads) // 2
    if qkv.device.type == "cuda":
        q, k = rotary.forward(qkv, num_heads, cos, sin, base, s, b)
    else:
        q, k = qkv.narrow(1, 0, num_heads), qkv.narrow(1, num_heads, num_kv_heads)
        q, k = rotate(q, cos, sin, query_factor(base, s, b)), rotate(k, cos, sin)
        # A rotation of nothing is no copy, and an operator's outputs must not be parts of its inputs.
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
    base: Tensor | None,
    s: Tensor | None,
    b: Tensor | None,
    cu_seqlens: Tensor,
    max_seqlen: int,
    uniform_length: int | None,
    scale: float,
    window: int | None,
    deterministic: bool,
    backend: str,
    slopes: bool,
    base_grad: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """dqkv [T, N + 2K, H], and the gradients of base [T], s [N] and b [N].

    slopes: whether s or b wants one; base_grad: whether base does. What is not asked for is empty.
    """
    num_heads, num_kv_heads = q.shape[1], k.shape[1]
    dqkv = torch.empty(qkv.shape, dtype=qkv.dtype, device=qkv.device)
    v, dv = (x.narrow(1, num_heads + num_kv_heads, num_kv_heads) for x in (qkv, dqkv))
    documents = Documents(cu_seqlens, max_seqlen, uniform_length, scale, window, deterministic, backend)
    dq, dk = backends.backward(grad_o, q, k, v, o, lse, documents, dv)
    if qkv.device.type == "cuda":
        return dqkv, *rotary.backward(dq, dk, qkv, dqkv, cos, sin, base, s, b, slopes, base_grad)
    return dqkv, *_rotate_back(dq, dk, qkv, dqkv, cos, sin, base, s, b, slopes, base_grad)


def _rotate_back(
    dq: Tensor,
    dk: Tensor,
    qkv: Tensor,
    dqkv: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    base: Tensor | None,
    s: Tensor | None,
    b: Tensor | None,
    slopes: bool,
    base_grad: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """`rotary.backward` in plain torch."""
    num_heads, num_kv_heads = dq.shape[1], dk.shape[1]
    wide = lse_dtype(qkv)
    minus_sin = None if sin is None else -sin
    du = rotate(dq.to(wide), cos, minus_sin)
    dqkv[:, num_heads : num_heads + num_kv_heads] = rotate(dk.to(wide), cos, minus_sin)
    factor = query_factor(base, s, b)
    dqkv[:, :num_heads] = du if factor is None else du * factor[..., None]
    dbase, ds, db = (qkv.new_empty(0, dtype=torch.float32 if x is None else x.dtype) for x in (base, s, b))
    if base is not None and s is not None and (slopes or base_grad):
        slope = (du * qkv[:, :num_heads].to(wide)).sum(2)  # [T, N]
        ds, db = (slope * base[:, None]).sum(0).to(ds.dtype), slope.sum(0).to(db.dtype)
        if base_grad:
            dbase = (slope * s.to(wide)).sum(1).to(dbase.dtype)
    return dbase, ds, db


@forward_op.register_fake
def _(qkv, cos, sin, base, s, b, cu_seqlens, num_heads, *_):  # type: ignore[no-untyped-def]
    total, heads, head_dim = qkv.shape
    q = qkv.new_empty(total, num_heads, head_dim)
    k = qkv.new_empty(total, (heads - num_heads) // 2, head_dim)
    return torch.empty_like(q), q.new_empty(q.shape[:2], dtype=lse_dtype(q)), q, k


@backward_op.register_fake
def _(grad_o, qkv, o, lse, q, k, cos, sin, base, s, b, *others):  # type: ignore[no-untyped-def]
    *_, slopes, base_grad = others
    num_heads = q.shape[1] if slopes or base_grad else 0
    sizes = (qkv.shape[0] if base_grad else 0, num_heads, num_heads)
    types = (torch.float32 if x is None else x.dtype for x in (base, s, b))
    return qkv.new_empty(qkv.shape), *(qkv.new_empty(size, dtype=dtype) for size, dtype in zip(sizes, types))


def _setup_context(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    qkv, cos, sin, base, s, b, cu_seqlens, _, *ctx.options = inputs
    o, lse, q, k = output
    ctx.save_for_backward(qkv, o, lse, q, k, cos, sin, base, s, b, cu_seqlens)
    ctx.set_materialize_grads(False)  # zeros for the outputs without a gradient would be as large as they are
    ctx.mark_non_differentiable(lse, q, k)
    ctx.wanted = [x is not None and x.requires_grad for x in (base, s, b)]


def _backward(ctx, grad_o, *_unused):  # type: ignore[no-untyped-def]
    base, s, b = ctx.wanted
    dqkv, *grads = backward_op(grad_o, *ctx.saved_tensors, *ctx.options, s or b, base)
    dbase, ds, db = (grad if wanted else None for grad, wanted in zip(grads, ctx.wanted))
    return dqkv, None, None, dbase, ds, db, *(None,) * 8


forward_op.register_autograd(_backward, setup_context=_setup_context)
