"""The kernels behind softmax attention, forward and backward, without autograd.

Every backend takes q [T, N, H], k and v [T, K, H] with any stride between tokens, and returns o [T, N, H] and
lse_i = ln Σ_j exp(scale · q_i·k_j) as [T, N] float32 (float64 for float64).
"""

import functools
import itertools
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor

from .. import exact
from ..exact import lse_dtype
from . import cudnn_graphs
from .documents import Documents

logger = logging.getLogger(__name__)

HALF = (torch.bfloat16, torch.float16)
# Backward's scratch in cuDNN's deterministic mode grows with documents × length² (12 GiB at 16 × 4,096); and plans for
# documents shorter than this cost more to build and to launch than they save.
CUDNN_MIN_LENGTH = 256

_varied = ContextVar("_varied", default=False)


@contextmanager
def varied_documents() -> Iterator[None]:
    """Inside, numbers and lengths of documents change from call to call: FlashAttention-2 runs, which builds no plans."""
    before = _varied.set(True)
    try:
        yield
    finally:
        _varied.reset(before)


def choose_backend(
    device: torch.device,
    dtype: torch.dtype,
    head_dim: int,
    max_seqlen: int,
    window: int | None,
    deterministic: bool,
    wanted: str = "auto",
) -> str:
    """`cudnn` (Hopper on), `varlen` (FlashAttention-2), `cpu` (torch's flash attention for CPUs) or `exact` (plain torch).

    deterministic: gradients must be the same bits in every run. wanted: `cudnn` or `flash`, in place of what is found to be
    faster; a CPU has one backend. Raises ValueError where it cannot run.
    """
    if device.type == "cpu":
        return "cpu" if window is None else "exact"
    if dtype not in HALF or head_dim % 8:
        if wanted != "auto":
            raise ValueError(
                f"backend={wanted} takes bf16 and fp16 in head dims that are multiples of 8, not {dtype}, {head_dim}"
            )
        return "exact"
    if wanted == "cudnn":
        if deterministic or not cudnn_graphs.available(device):
            reason = "has no deterministic gradients" if deterministic else "is not available on this GPU"
            raise ValueError(f"backend=cudnn {reason}: use auto or flash")
        return "cudnn"
    if wanted == "flash":
        return "varlen"
    if deterministic or max_seqlen < CUDNN_MIN_LENGTH or _varied.get() or not cudnn_graphs.available(device):
        return "varlen"
    return "cudnn"


def forward(q: Tensor, k: Tensor, v: Tensor, documents: Documents) -> tuple[Tensor, Tensor]:
    """o and lse."""
    backend = _choose(q, documents)
    if backend == "cudnn":
        return cudnn_graphs.forward(q, k, v, documents)
    if backend == "varlen":
        return _varlen_forward(q, k, v, documents)
    o, lse = torch.empty(q.shape, dtype=q.dtype, device=q.device), q.new_empty(q.shape[:2], dtype=lse_dtype(q))
    for part, length in _parts(documents, q.shape[0]):
        query, key, value = (_heads(_batched(x[part], length), q.shape[1]) for x in (q, k, v))
        if backend == "exact":
            o_part, lse_part = exact.forward(query, key, value, documents.scale, causal=True, window=documents.window)
        else:
            o_part, lse_part = _cpu_forward(query, key, value, documents)
        o[part] = o_part.transpose(1, 2).flatten(0, 1)
        lse[part] = lse_part.transpose(1, 2).flatten(0, 1)
    return o, lse


def backward(
    grad_o: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, documents: Documents, dv: Tensor
) -> tuple[Tensor, Tensor]:
    """dq and dk, contiguous; the gradient of v goes into `dv` [T, K, H], which may be a part of a larger tensor."""
    backend = _choose(q, documents)
    grad_o = grad_o.contiguous()
    if backend == "cudnn":
        return cudnn_graphs.backward(grad_o, q, k, v, o, lse, documents, dv)
    if backend == "varlen":
        dq, dk, varlen_dv = _varlen_backward(grad_o, q, k, v, o, lse, documents)
        dv.copy_(varlen_dv)
        return dq, dk
    dq, dk = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k))
    for part, length in _parts(documents, q.shape[0]):
        grad, query, key, value, o_part = (_heads(_batched(x[part], length), q.shape[1]) for x in (grad_o, q, k, v, o))
        lse_part = lse[part].unflatten(0, (-1, length)).transpose(1, 2)
        tensors = (grad, query, key, value, o_part, lse_part)
        if backend == "exact":
            window, partial = documents.window, documents.partial
            grads = exact.backward(*tensors, documents.scale, causal=True, window=window, partial=partial)
        else:
            grads = _cpu_backward(*tensors, documents)
        for out, d_part in zip((dq, dk, dv), grads):
            # Keys that several query heads share get the sum of their gradients.
            shared = d_part.unflatten(1, (out.shape[1], -1)).sum(2) if d_part.shape[1] != out.shape[1] else d_part
            out[part] = shared.transpose(1, 2).flatten(0, 1)
    return dq, dk


def _choose(q: Tensor, documents: Documents) -> str:
    backend = choose_backend(
        q.device,
        q.dtype,
        q.shape[2],
        documents.max_seqlen,
        documents.window,
        documents.deterministic,
        documents.backend,
    )
    _announce(backend, str(q.dtype).removeprefix("torch."))
    return backend


@functools.cache
def _announce(backend: str, dtype: str) -> None:
    names = {"varlen": "FlashAttention-2 (varlen)", "cudnn": "cuDNN", "cpu": "the CPU", "exact": "plain torch"}
    logger.info("softmax attention in %s runs on %s", dtype, names[backend])


def _varlen_forward(q: Tensor, k: Tensor, v: Tensor, documents: Documents) -> tuple[Tensor, Tensor]:
    cu, longest = documents.cu_seqlens, documents.max_seqlen
    left, is_causal = _reach(documents)
    o, lse, *_ = torch.ops.aten._flash_attention_forward(
        q,
        k,
        v,
        cu,
        cu,
        longest,
        longest,
        0.0,
        is_causal,
        False,
        scale=documents.scale,
        window_size_left=left,
        window_size_right=0,
    )
    return o, lse.t().contiguous()  # [N, T] there


def _varlen_backward(
    grad_o: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, documents: Documents
) -> tuple[Tensor, Tensor, Tensor]:
    cu, longest = documents.cu_seqlens, documents.max_seqlen
    left, is_causal = _reach(documents)
    no_dropout = torch.zeros(2, dtype=torch.uint64, device=q.device)
    was, warned = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    # FlashAttention-2 reads torch's global flag, and not where it only warns.
    torch.use_deterministic_algorithms(documents.deterministic)
    try:
        dq, dk, dv = torch.ops.aten._flash_attention_backward(
            grad_o,
            q,
            k,
            v,
            o,
            lse.t().contiguous(),
            cu,
            cu,
            longest,
            longest,
            0.0,
            is_causal,
            no_dropout,
            q.new_empty(0),
            scale=documents.scale,
            window_size_left=left,
            window_size_right=0,
        )
    finally:
        torch.use_deterministic_algorithms(was, warn_only=warned)
    return dq.contiguous(), dk.contiguous(), dv


def _reach(documents: Documents) -> tuple[int, bool]:
    """FlashAttention-2's left bound and causal flag: either a causal mask or a window that ends at the query."""
    return (-1, True) if documents.window is None else (documents.window - 1, False)


def _parts(documents: Documents, total: int) -> list[tuple[slice, int]]:
    """Runs of equally long documents, as slices of the tokens and the documents' length."""
    starts: list[int] = documents.cu_seqlens.tolist()
    if starts[0] != 0 or starts[-1] != total or any(a > b for a, b in itertools.pairwise(starts)):
        shown = starts if len(starts) < 20 else [*starts[:10], "...", *starts[-9:]]
        raise ValueError(f"cu_seqlens must ascend from 0 to {total}, got {shown}")
    if documents.uniform_length and total:
        return [(slice(0, total), documents.uniform_length)]
    return [(slice(a, b), b - a) for a, b in itertools.pairwise(starts) if b > a]


def _batched(x: Tensor, length: int) -> Tensor:
    """[B · length, N, H] → [B, N, length, H]"""
    return x.unflatten(0, (-1, length)).transpose(1, 2)


def _heads(x: Tensor, num_heads: int) -> Tensor:
    """Key heads repeated for the query heads that share them."""
    return x if x.shape[1] == num_heads else x.repeat_interleave(num_heads // x.shape[1], 1)


def _cpu_forward(q: Tensor, k: Tensor, v: Tensor, documents: Documents) -> tuple[Tensor, Tensor]:
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    return flash(q, k, v, 0.0, True, scale=documents.scale)


def _cpu_backward(
    grad_o: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, documents: Documents
) -> tuple[Tensor, Tensor, Tensor]:
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    return flash(grad_o, q, k, v, o, lse, 0.0, True, scale=documents.scale)
