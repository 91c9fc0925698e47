"""The registered operators, which torch.compile and autograd see. Each device has its own implementation."""

import itertools
import logging

import torch
from torch import Tensor

from ..versions import mark
from . import torch_path
from .kept import aux_shapes, carry_dtype

mark(__file__)

logger = logging.getLogger(__name__)

# Beyond, both parts of float32 operands exceed the registers of the backward kernels, and torch runs instead, in chunks.
MAX_FLOAT32_DIM = 64
NUM_AUX = 4  # results of forward_op after o and log_rest, which backward_op takes

_announced: set[str] = set()


def announce(path: str) -> None:
    """Logs which implementation runs, once per process."""
    if path not in _announced:
        _announced.add(path)
        logger.info("stick-breaking attention runs on %s", path)


def starts(name: str, cu_seqlens: Tensor, total: int) -> list[int]:
    """Returns the boundaries as integers. Raises ValueError unless they ascend from 0 to `total` (empty is fine)."""
    values: list[int] = cu_seqlens.tolist()
    if values[0] != 0 or values[-1] != total or any(a > b for a, b in itertools.pairwise(values)):
        raise ValueError(
            f"{name} must ascend from 0 to {total}, got {values if len(values) < 20 else [*values[:10], '...', *values[-9:]]}"
        )
    return values


def _host_layout(
    q: Tensor, k: Tensor, cu_q: Tensor, cu_k: Tensor, q_offsets: Tensor | None
) -> tuple[list[int], list[int], list[int]]:
    starts_q = starts("cu_seqlens_q", cu_q, q.shape[0])
    starts_k = starts("cu_seqlens_k", cu_k, k.shape[0])
    offsets = [0] * (len(starts_q) - 1) if q_offsets is None else q_offsets.tolist()
    return starts_q, starts_k, offsets


def _rest_dtype(q: Tensor) -> torch.dtype:
    return torch.float64 if q.dtype == torch.float64 else torch.float32


@torch.library.custom_op("stickbreaking::forward", mutates_args=(), device_types="cpu")
def forward_op(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    q_offsets: Tensor | None,
    log_rest_in: Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    scale: float,
    skip_below: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Returns o, log_rest and what backward needs on a GPU.

    That is row_carry and row_tile (the last carry of each row, and its tile), block_stop (the last tile of each row
    block) and maxima (see half.py).
    """
    announce("the CPU: plain torch, exact (nothing is skipped)")
    layout = _host_layout(q, k, cu_seqlens_q, cu_seqlens_k, q_offsets)
    o, log_rest = torch_path.forward(q, k, v, log_rest_in, *layout, scale)
    return (
        o,
        log_rest,
        q.new_empty(0, dtype=torch.float32),
        q.new_empty(0, dtype=torch.int32),
        q.new_empty(0, dtype=torch.int32),
        q.new_empty((0, 4), dtype=torch.int32),
    )


@torch.library.custom_op("stickbreaking::decode", mutates_args=(), device_types="cpu")
def decode_op(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    q_offsets: Tensor | None,
    log_rest_in: Tensor | None,
    max_seqlen_q: int,
    max_seqlen_k: int,
    scale: float,
    skip_below: float,
) -> tuple[Tensor, Tensor]:
    """Attention of a few queries per sequence, without gradients."""
    layout = _host_layout(q, k, cu_seqlens_q, cu_seqlens_k, q_offsets)
    return torch_path.forward(q, k, v, log_rest_in, *layout, scale)


@torch.library.custom_op("stickbreaking::backward", mutates_args=(), device_types="cpu")
def backward_op(
    grad_o: Tensor,
    grad_log_rest: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    q_offsets: Tensor | None,
    log_rest_in: Tensor | None,
    row_carry: Tensor,
    row_tile: Tensor,
    block_stop: Tensor,
    maxima: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    scale: float,
    skip_below: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    layout = _host_layout(q, k, cu_seqlens_q, cu_seqlens_k, q_offsets)
    return torch_path.backward(grad_o, grad_log_rest, q, k, v, log_rest_in, *layout, scale)


# `register_kernel` would check at each call that no result shares memory with an argument, which takes as long as a launch.
_direct = torch.library.Library("stickbreaking", "IMPL")


@torch.library.impl(_direct, "forward", "CUDA")
def triton_forward(  # type: ignore[no-untyped-def]
    q, k, v, cu_seqlens_q, cu_seqlens_k, q_offsets, log_rest_in, max_seqlen_q, max_seqlen_k, scale, skip_below,
):  # fmt: skip
    # imported here because a machine without a GPU may lack Triton
    from .forward import forward

    announce(f"{q.device}: Triton kernels, {q.dtype}, skipping below {skip_below:g}")
    return forward(
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        q_offsets,
        log_rest_in,
        max_seqlen_k,
        scale,
        skip_below,
        max_queries=max_seqlen_q,
    )


@decode_op.register_kernel("cuda")
def _(q, k, v, cu_seqlens_q, cu_seqlens_k, q_offsets, log_rest_in, max_seqlen_q, max_seqlen_k, scale, skip_below):  # type: ignore[no-untyped-def]
    from . import decode

    announce(f"{q.device}: Triton split-KV decoding, {q.dtype}, skipping below {skip_below:g}")
    return decode.decode(
        q, k, v, cu_seqlens_q, cu_seqlens_k, q_offsets, log_rest_in, max_seqlen_q, max_seqlen_k, scale, skip_below
    )


@torch.library.impl(_direct, "backward", "CUDA")
def triton_backward(  # type: ignore[no-untyped-def]
    grad_o, grad_log_rest, q, k, v, cu_seqlens_q, cu_seqlens_k, q_offsets, log_rest_in, row_carry, row_tile, block_stop,
    maxima, max_seqlen_q, max_seqlen_k, scale, skip_below,
):  # fmt: skip
    arguments = (
        grad_o, grad_log_rest, q, k, v, cu_seqlens_q, cu_seqlens_k, q_offsets, row_carry, row_tile, block_stop, maxima,
        max_seqlen_q, max_seqlen_k, scale, skip_below,
    )  # fmt: skip
    if q.dtype == torch.float32 and q.shape[2] > MAX_FLOAT32_DIM:
        layout = _host_layout(q, k, cu_seqlens_q, cu_seqlens_k, q_offsets)
        return torch_path.backward(grad_o, grad_log_rest, q, k, v, log_rest_in, *layout, scale)
    from .backward import backward

    return backward(*arguments)


@forward_op.register_fake
def _(q, k, v, cu_seqlens_q, *_):  # type: ignore[no-untyped-def]
    carry, tile, stop, sequences = (0,), (0,), (0,), 0
    if q.device.type != "cpu":
        sequences = cu_seqlens_q.shape[0] - 1 if q.dtype == torch.bfloat16 else 0
        carry, tile, stop = aux_shapes(q.shape[0], q.shape[1], cu_seqlens_q.shape[0] - 1)
    return (
        torch.empty_like(q, memory_format=torch.contiguous_format),
        q.new_empty(q.shape[:2], dtype=_rest_dtype(q)),
        q.new_empty(carry, dtype=torch.float32 if q.device.type == "cpu" else carry_dtype(q.dtype)),
        q.new_empty(tile, dtype=torch.int32),
        q.new_empty(stop, dtype=torch.int32),
        q.new_empty((sequences, 4), dtype=torch.int32),
    )


@decode_op.register_fake
def _(q, *_):  # type: ignore[no-untyped-def]
    return torch.empty_like(q, memory_format=torch.contiguous_format), q.new_empty(q.shape[:2], dtype=_rest_dtype(q))


@backward_op.register_fake
def _(grad_o, grad_log_rest, q, k, v, *_):  # type: ignore[no-untyped-def]
    like = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v)]
    return (*like, q.new_empty(q.shape[:2], dtype=_rest_dtype(q)))


def _setup_context(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    q, k, v, cu_q, cu_k, q_offsets, log_rest_in, ctx.max_q, ctx.max_k, ctx.scale, ctx.skip_below = inputs
    _, _, *aux = output
    # An unused log_rest has no gradient. By default, autograd would pass a tensor of zeros, which would have to be
    # read.
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(q, k, v, cu_q, cu_k, q_offsets, log_rest_in, *aux)


def _backward(ctx, grad_o, grad_log_rest, *_unused):  # type: ignore[no-untyped-def]
    q, *rest = ctx.saved_tensors
    if grad_o is None:
        grad_o = torch.zeros_like(q)
    dq, dk, dv, d_entering = backward_op(
        grad_o, grad_log_rest, q, *rest, ctx.max_q, ctx.max_k, ctx.scale, ctx.skip_below
    )
    log_rest_in = rest[5]
    d_log_rest_in = None if log_rest_in is None else d_entering.to(log_rest_in.dtype)
    return dq, dk, dv, None, None, None, d_log_rest_in, *(None,) * 4


forward_op.register_autograd(_backward, setup_context=_setup_context)
