"""The registered operators, which torch.compile and autograd see. `backends` computes them."""

import torch
from torch import Tensor

from ..exact import lse_dtype
from ..versions import mark
from . import backends
from .documents import Documents

mark(__file__)


@torch.library.custom_op("softmax_attention::forward", mutates_args=())
def forward_op(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    uniform_length: int | None,
    scale: float,
    window: int | None,
    deterministic: bool,
    backend: str,
) -> tuple[Tensor, Tensor]:
    """`softmax_attention` without its checks and defaults. Returns o [T, N, H] and lse [T, N]."""
    documents = Documents(cu_seqlens, max_seqlen, uniform_length, scale, window, deterministic, backend)
    return backends.forward(q, k, v, documents)


@torch.library.custom_op("softmax_attention::backward", mutates_args=())
def backward_op(
    grad_o: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    uniform_length: int | None,
    scale: float,
    window: int | None,
    deterministic: bool,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq [T, N, H], dk and dv [T, K, H]. o, lse: what `forward_op` returned for the same other arguments."""
    dv = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    documents = Documents(cu_seqlens, max_seqlen, uniform_length, scale, window, deterministic, backend)
    return *backends.backward(grad_o, q, k, v, o, lse, documents, dv), dv


@forward_op.register_fake
def _(q, *_):  # type: ignore[no-untyped-def]
    return q.new_empty(q.shape), q.new_empty(q.shape[:2], dtype=lse_dtype(q))


@backward_op.register_fake
def _(grad_o, q, k, v, *_):  # type: ignore[no-untyped-def]
    return tuple(x.new_empty(x.shape) for x in (q, k, v))


def _setup_context(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    q, k, v, cu_seqlens, *ctx.options = inputs
    ctx.save_for_backward(q, k, v, *output, cu_seqlens)
    ctx.set_materialize_grads(False)  # zeros as gradients of the unused outputs would be as large as these
    ctx.mark_non_differentiable(output[1])


def _backward(ctx, grad_o, _grad_lse):  # type: ignore[no-untyped-def]
    return *backward_op(grad_o, *ctx.saved_tensors, *ctx.options), *(None,) * 7


forward_op.register_autograd(_backward, setup_context=_setup_context)
