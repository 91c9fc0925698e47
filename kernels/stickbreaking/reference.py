"""Stick-breaking attention in plain torch: the definition against which the kernels are tested."""

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid


def stickbreaking_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    q_offsets: Tensor | None = None,
    scale: float | None = None,
    log_rest_in: Tensor | None = None,
    skip_below: float = 0.0,
    deterministic: bool = True,
) -> tuple[Tensor, Tensor]:
    """o_j = e^log_rest_in Σ_{i<j} A_ij v_i,  A_ij = β_ij Π_{i<m<j} (1 − β_mj),  β_ij = σ(scale · q_j·k_i)

    This is Eq. 1 of arXiv:2410.17980. Signature, shapes and results are those of `stickbreaking_attention`. The whole
    matrix of every sequence is materialised, in float64 for float64 inputs and in float32 otherwise. autograd
    differentiates it. Nothing is skipped: `skip_below`, `deterministic` and the two maxima are accepted but ignored.
    """
    num_tokens, num_heads, head_dim = q.shape
    num_keys, num_kv_heads, _ = k.shape
    scale = head_dim**-0.5 if scale is None else scale
    starts_q = [0, num_tokens] if cu_seqlens_q is None else cu_seqlens_q.tolist()
    same_as_q = cu_seqlens_k is None and num_keys == num_tokens
    starts_k = starts_q if same_as_q else [0, num_keys] if cu_seqlens_k is None else cu_seqlens_k.tolist()
    offsets = [0] * (len(starts_q) - 1) if q_offsets is None else q_offsets.tolist()

    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    group = num_heads // num_kv_heads
    outs, rests = [], []
    for i, offset in enumerate(offsets):
        q_i = q[starts_q[i] : starts_q[i + 1]].to(dtype).transpose(0, 1)  # [N, Lq, H]
        k_i, v_i = (x[starts_k[i] : starts_k[i + 1]].to(dtype).transpose(0, 1) for x in (k, v))
        k_i, v_i = (x.repeat_interleave(group, 0) for x in (k_i, v_i))  # [N, Lk, H]
        z = scale * q_i @ k_i.transpose(1, 2)  # [N, Lq, Lk]
        position = offset + torch.arange(z.shape[1], device=q.device)
        visible = torch.arange(z.shape[2], device=q.device) < position[:, None]

        log_keep = torch.where(visible, logsigmoid(-z), 0.0)  # ln(1 − β)
        # The zero column gives an exclusive sum. Subtracting log_keep from the inclusive one would cancel when it is
        # huge.
        log_keep = (
            torch.cat([log_keep, torch.zeros_like(log_keep[..., :1])], -1)
            if z.shape[2]
            else z.new_zeros(*z.shape[:2], 1)
        )
        suffix = log_keep.flip(-1).cumsum(-1).flip(-1)
        rest = suffix[..., 0]
        if log_rest_in is not None:
            entering = log_rest_in[starts_q[i] : starts_q[i + 1]].to(dtype).transpose(0, 1)
            suffix, rest = suffix + entering[..., None], rest + entering
        weights = torch.where(visible, (logsigmoid(z) + suffix[..., 1:]).exp(), 0.0)
        outs.append((weights @ v_i).transpose(0, 1))
        rests.append(rest.transpose(0, 1))
    return torch.cat(outs).to(q.dtype), torch.cat(rests)


def merge(near: tuple[Tensor, Tensor], far: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Returns (o₁ + e^a₁ o₂, a₁ + a₂): attention to nearer keys, then to farther keys with the stick that is left.

    near, far: (o [T, N, H], log_rest [T, N]), computed independently (`far` without log_rest_in). The operation is
    associative. It computes in float32 (float64 for float64) and returns o in the dtype of `near`. Raises ValueError
    for other shapes.
    """
    (o_near, rest_near), (o_far, rest_far) = near, far
    if o_near.shape != o_far.shape or rest_near.shape != o_near.shape[:2] or rest_far.shape != o_far.shape[:2]:
        shapes = [tuple(x.shape) for x in (o_near, rest_near, o_far, rest_far)]
        raise ValueError(f"merge takes o [T, N, H] and log_rest [T, N] twice, got {shapes}")
    o = o_near.to(rest_near.dtype) + rest_near.exp()[..., None] * o_far.to(rest_near.dtype)
    return o.to(o_near.dtype), rest_near + rest_far
