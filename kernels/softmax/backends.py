"""The kernels that compute softmax attention, forward and backward, without autograd.

Every backend takes q [T, N, H] and k, v [T, K, H] with any stride between tokens, and returns o [T, N, H] in the
dtype of q and lse_i = ln Σ_j exp(scale · q_i·k_j) as [T, N] float32 (float64 for float64).
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
# For shorter documents, cuDNN's plans cost more to build and to launch than they save.
CUDNN_MIN_LENGTH = 256

_varied = ContextVar("_varied", default=False)


@contextmanager
def varied_documents() -> Iterator[None]:
    """Declares that documents change in number and length with every call: FlashAttention-2 runs, without plans."""
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
    """`cudnn` (from Hopper on), `varlen` (FlashAttention-2), `cpu` (torch's for CPUs) or `exact` (plain torch).

    deterministic: gradients must be the same bits in every run. wanted: `cudnn` or `flash` replace the choice of the
    faster one (`auto`) on a GPU; a CPU ignores them. Raises ValueError where the wanted one cannot run.
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
    # cuDNN's deterministic mode needs scratch of documents × length² (12 GiB at 16 × 4,096), so it is not used.
    if deterministic or max_seqlen < CUDNN_MIN_LENGTH or _varied.get() or not cudnn_graphs.available(device):
        return "varlen"
    return "cudnn"


def forward(q: Tensor, k: Tensor, v: Tensor, documents: Documents) -> tuple[Tensor, Tensor]:
    """o [T, N, H] and lse [T, N]. Raises ValueError for unfit backends and, on the CPU, unfit cu_seqlens."""
    backend = _choose(q, documents)
    if backend == "cudnn":
        return cudnn_graphs.forward(q, k, v, documents)
    if backend == "varlen":
        return _varlen_forward(q, k, v, documents)
    o, lse = torch.empty(q.shape, dtype=q.dtype, device=q.device), q.new_empty(q.shape[:2], dtype=lse_dtype(q))
    for tokens, length in _runs(documents, q.shape[0]):
        # [B, N, length, H]
        query, key, value = (_repeated(_batched(x[tokens], length), q.shape[1]) for x in (q, k, v))
        if backend == "exact":
            o_run, lse_run = exact.forward(query, key, value, documents.scale, causal=True, window=documents.window)
        else:
            o_run, lse_run = _cpu_forward(query, key, value, documents.scale)
        o[tokens] = o_run.transpose(1, 2).flatten(0, 1)
        lse[tokens] = lse_run.transpose(1, 2).flatten(0, 1)
    return o, lse


def backward(
    grad_o: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    documents: Documents,
    dv: Tensor,
) -> tuple[Tensor, Tensor]:
    """dq [T, N, H] and dk [T, K, H], contiguous. Writes the gradient of v to `dv` [T, K, H], of any token stride."""
    backend = _choose(q, documents)
    grad_o = grad_o.contiguous()
    if backend == "cudnn":
        return cudnn_graphs.backward(grad_o, q, k, v, o, lse, documents, dv)
    if backend == "varlen":
        dq, dk, varlen_dv = _varlen_backward(grad_o, q, k, v, o, lse, documents)
        dv.copy_(varlen_dv)
        return dq, dk
    dq, dk = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k))
    for tokens, length in _runs(documents, q.shape[0]):
        # [B, N, length, H]
        d_out, query, key, value, out = (
            _repeated(_batched(x[tokens], length), q.shape[1]) for x in (grad_o, q, k, v, o)
        )
        # [B, N, length]
        lse_run = lse[tokens].unflatten(0, (-1, length)).transpose(1, 2)
        tensors = (d_out, query, key, value, out, lse_run)
        if backend == "exact":
            window, partial = documents.window, documents.partial
            grads = exact.backward(*tensors, documents.scale, causal=True, window=window, partial=partial)
        else:
            grads = _cpu_backward(*tensors, documents.scale)
        for target, grad in zip((dq, dk, dv), grads):
            # A key head that several query heads share gets the sum of their gradients.
            shared = grad if grad.shape[1] == target.shape[1] else grad.unflatten(1, (target.shape[1], -1)).sum(2)
            target[tokens] = shared.transpose(1, 2).flatten(0, 1)
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
    return o, lse.t().contiguous()  # FlashAttention-2 has it as [N, T]


def _varlen_backward(
    grad_o: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    documents: Documents,
) -> tuple[Tensor, Tensor, Tensor]:
    cu, longest = documents.cu_seqlens, documents.max_seqlen
    left, is_causal = _reach(documents)
    no_dropout = torch.zeros(2, dtype=torch.uint64, device=q.device)
    was, warned = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    # FlashAttention-2 reads torch's global flag, and ignores it in its mode that only warns.
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


def _runs(documents: Documents, total: int) -> list[tuple[slice, int]]:
    """Slices of the tokens whose documents share one length, and that length: all tokens, or one document per slice."""
    starts: list[int] = documents.cu_seqlens.tolist()
    if starts[0] != 0 or starts[-1] != total or any(a > b for a, b in itertools.pairwise(starts)):
        shown = starts if len(starts) < 20 else [*starts[:10], "...", *starts[-9:]]
        raise ValueError(f"cu_seqlens must ascend from 0 to {total}, got {shown}")
    if documents.uniform_length and total:
        return [(slice(0, total), documents.uniform_length)]
    return [(slice(a, b), b - a) for a, b in itertools.pairwise(starts) if b > a]


def _batched(x: Tensor, length: int) -> Tensor:
    """[B · length, N, H] → [B, N, length, H]."""
    return x.unflatten(0, (-1, length)).transpose(1, 2)


def _repeated(x: Tensor, num_heads: int) -> Tensor:
    """[B, K, length, H] → [B, N, length, H]: each key head once for every query head that shares it."""
    return x if x.shape[1] == num_heads else x.repeat_interleave(num_heads // x.shape[1], 1)


def _cpu_forward(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    return flash(q, k, v, 0.0, True, scale=scale)


def _cpu_backward(
    grad_o: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    return flash(grad_o, q, k, v, o, lse, 0.0, True, scale=scale)
