"""Compares stick-breaking attention with float64: o, log_rest and all gradients, with and without skipping.

Tests use it on a GPU and in Triton's interpreter; so do `benchmark`, `fuzz` and `measure`.
"""

import itertools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .interface import stickbreaking_attention
from .reference import stickbreaking_reference

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
SKIP = 2.0**-12
KINDS = ("normal", "huge", "low", "one-hot", "edge", "in range", "between")
# What results besides o are differentiated: nothing, log_rest, log_rest with a stick from nearer keys, or o is the
# remainder variant's (Eq. 13).
USES = ("o", "log_rest", "carried", "remainder")


class Case(NamedTuple):
    dtype: torch.dtype = BF16
    head_dim: int = 64
    kind: str = "normal"
    use: str = "o"
    skip_below: float = 0.0
    heads: tuple[int, int] = (4, 2)  # query heads, key heads
    lengths: tuple[int, ...] = (1, 0, 399, 700)
    keys: tuple[int, ...] | None = None  # None: as many as queries
    offsets: tuple[int, ...] | None = None


class Inputs(NamedTuple):
    """q, k, v, log_rest_in and the gradients of o and of log_rest. None: not given."""

    q: Tensor
    k: Tensor
    v: Tensor
    log_rest_in: Tensor | None
    grad_o: Tensor
    grad_rest: Tensor | None
    layout: dict[str, Any]
    remainder: bool
    skip_below: float


class Error(NamedTuple):
    """The largest error of a result beyond what skipping may change, plain torch's, and the largest exact value."""

    beyond: float
    plain: float
    size: float


def starts(lengths: tuple[int, ...] | list[int], device: str) -> Tensor:
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device=device)


def logits(kind: str, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """Returns unit normal q and k, changed so that their logits are of a kind of KINDS."""
    if kind == "huge":
        return q * 30, k
    if kind == "low":
        return 1 + q.abs(), -1 - k.abs()
    if kind == "one-hot":  # a few keys take everything, and the others take nothing
        return 1 + q.abs(), torch.where(torch.rand_like(k[..., :1]) < 0.1, 8.0, -8.0) * (1 + k.abs())
    if kind == "edge":  # 16 keys spend 120 bits: less than float32 can express, but more than tile.RANGE
        return torch.ones_like(q), (5.2 + k / 20) / q.shape[-1] ** 0.5
    if kind == "in range":  # 16 keys spend 102 bits: tile.RANGE_SKIPPING has room for them, tile.RANGE does not
        return torch.ones_like(q), (4.4 + k / 20) / q.shape[-1] ** 0.5
    if kind == "between":  # 20 keys far from the diagonal take all of every other row, and the other rows walk on
        q, k, size, at = q / 10, k / 10, q.shape[-1] ** 0.5, 2 * len(k) // 3
        q[..., 0], q[..., 1], k[..., 0], k[..., 1] = 0.0, 1.0, -size, -3 * size
        q[::2, :, 0], q[::2, :, 1], k[at : at + 20, :, 0] = 4.0, 0.0, 2 * size
    return q, k


def draw(case: Case, device: str, seed: int = 0) -> Inputs:
    torch.manual_seed(seed)
    keys = case.keys or case.lengths
    sizes = (sum(case.lengths), case.heads[0]), (sum(keys), case.heads[1])
    (q, grad_o), (k, v) = ([torch.randn(*s, case.head_dim, device=device) for _ in range(2)] for s in sizes)
    q, k = logits(case.kind, q, k)
    layout: dict[str, Any] = {"cu_seqlens_q": starts(case.lengths, device), "max_seqlen_q": max(case.lengths)}
    if case.keys is not None:
        layout |= {"cu_seqlens_k": starts(case.keys, device), "max_seqlen_k": max(case.keys)}
    if case.offsets is not None:
        layout["q_offsets"] = torch.tensor(case.offsets, dtype=torch.int32, device=device)
    entering = -8 * torch.rand(q.shape[:2], device=device) if case.use == "carried" else None
    grad_rest = torch.randn(q.shape[:2], device=device) if case.use in ("log_rest", "carried") else None
    q, k, v, grad_o = (x.to(case.dtype) for x in (q, k, v, grad_o))
    return Inputs(q, k, v, entering, grad_o, grad_rest, layout, case.use == "remainder", case.skip_below)


def differentiate(
    function: Callable[..., tuple[Tensor, Tensor]], inputs: Inputs, exact: bool = False, **options: Any
) -> dict[str, Tensor]:
    """Returns o, log_rest and the gradients of a loss that is linear in them. exact: computes in float64."""
    wide = torch.float64 if exact else torch.float32
    leaves = {name: getattr(inputs, name).to(wide if exact else inputs.q.dtype) for name in ("q", "k", "v")}
    if inputs.log_rest_in is not None:
        leaves["log_rest_in"] = inputs.log_rest_in.to(wide)
    leaves = {name: x.detach().requires_grad_() for name, x in leaves.items()}
    o, rest = function(**leaves, **inputs.layout, **options)
    if inputs.remainder:
        own = leaves["v"].repeat_interleave(o.shape[1] // inputs.v.shape[1], 1)
        o = o + (rest.exp()[..., None] * own).to(o.dtype)
    outputs = {"o": (o, inputs.grad_o)}
    if inputs.grad_rest is not None:
        outputs["log_rest"] = (rest, inputs.grad_rest)
    pairs = [(x, grad.to(x.dtype)) for x, grad in outputs.values()]
    found = torch.autograd.grad([x for x, _ in pairs], list(leaves.values()), [grad for _, grad in pairs])
    results = {"o": o, "log_rest": rest} | {f"d_{name}": x for name, x in zip(leaves, found, strict=True)}
    return {name: x.detach().double() for name, x in results.items()}


def _sequences(inputs: Inputs) -> Iterator[tuple[slice, slice, Tensor, Tensor, Tensor]]:
    """Yields each sequence's queries and keys, β [N, Q, S], the keys per head [N, S, H], and M [N, Q, 1]."""
    layout = inputs.layout
    cu_q = layout["cu_seqlens_q"].tolist()
    cu_k = layout.get("cu_seqlens_k", layout["cu_seqlens_q"]).tolist()
    offsets = layout["q_offsets"].tolist() if "q_offsets" in layout else [0] * (len(cu_q) - 1)
    group, scale = inputs.q.shape[1] // inputs.k.shape[1], inputs.q.shape[2] ** -0.5
    for i, offset in enumerate(offsets):
        rows, keys = slice(cu_q[i], cu_q[i + 1]), slice(cu_k[i], cu_k[i + 1])
        if rows.stop == rows.start or keys.stop == keys.start:
            continue
        q, grad = (x[rows].double().transpose(0, 1) for x in (inputs.q, inputs.grad_o))
        k, v = (x[keys].double().repeat_interleave(group, 1).transpose(0, 1) for x in (inputs.k, inputs.v))
        beta = torch.sigmoid(scale * q @ k.transpose(1, 2)).tril(offset - 1)
        seen = offset if inputs.remainder else offset - 1
        largest = (grad @ v.transpose(1, 2)).tril(seen).abs().amax(2, keepdim=True)
        yield rows, keys, beta, k, largest


def skipping_bounds(inputs: Inputs) -> dict[str, Tensor]:
    """Returns what skipping may change in o, e^log_rest and the gradients, elementwise (README.md derives it)."""
    skip, scale = inputs.skip_below, inputs.q.shape[2] ** -0.5
    names = {"d_q": inputs.q, "d_k": inputs.k, "d_v": inputs.v}
    bounds = {name: torch.zeros_like(x, dtype=torch.float64) for name, x in names.items()}
    times = 2 if inputs.remainder else 1
    bounds["o"] = torch.full_like(inputs.q, times * skip * inputs.v.abs().max().item(), dtype=torch.float64)
    for rows, keys, beta, k, largest in _sequences(inputs):
        dz = (1 + times) * skip * largest * beta
        q, grad = (x[rows].double().abs().transpose(0, 1) for x in (inputs.q, inputs.grad_o))
        d_v = skip * beta.transpose(1, 2) @ grad
        if inputs.remainder:
            d_v += skip * grad
        of_keys = (scale * dz.transpose(1, 2) @ q, d_v)
        bounds["d_q"][rows] = (scale * dz @ k.abs()).transpose(0, 1)
        for name, x in zip(("d_k", "d_v"), of_keys, strict=True):
            bounds[name][keys] = x.transpose(0, 1).unflatten(1, (inputs.k.shape[1], -1)).sum(2)
    return bounds


def compare(
    inputs: Inputs, function: Callable[..., tuple[Tensor, Tensor]] = stickbreaking_attention, **options: Any
) -> dict[str, Error]:
    """Returns the error of each result of `function` with `options`.

    A skipped key's share of log_rest's gradient is lost, so with skip_below, inputs must have no gradient of log_rest.
    log_rest is then compared as e^log_rest, of which skipping may leave up to skip_below too much.
    """
    skip = inputs.skip_below
    assert not (skip and inputs.grad_rest is not None)
    ours = differentiate(function, inputs, skip_below=skip, **options)
    plain = differentiate(stickbreaking_reference, inputs)
    exact = differentiate(stickbreaking_reference, inputs, exact=True)
    bounds: dict[str, Any] = skipping_bounds(inputs) if skip else {}
    if skip:
        ours, plain, exact = (found | {"log_rest": found["log_rest"].exp()} for found in (ours, plain, exact))
        bounds["log_rest"] = skip
    errors = {}
    for name, x in ours.items():
        if x.numel():
            beyond = ((x - exact[name]).abs() - bounds.get(name, 0.0)).max()
            torch_error, size = (plain[name] - exact[name]).abs().max(), exact[name].abs().max()
            errors[name] = Error(*torch.stack([beyond, torch_error, size]).tolist())
    return errors


def share(error: Error) -> float:
    """Returns an error in units of what is allowed: twice plain torch's, and 1e-5 of the result or of 1.

    One-hot gradients cancel to zero, except for the rounding of terms of size one.
    """
    return error.beyond / (2 * error.plain + 1e-5 * max(error.size, 1.0))


def cases() -> list[Case]:
    """Returns the cases that are checked on a GPU: every option with every dtype, skipping on and off."""
    found = [Case(d, h) for d in (BF16, FP16, FP32) for h in (16, 24, 32, 64, 80, 128)]
    found += [Case(d, 64, kind) for d in (BF16, FP16, FP32) for kind in KINDS[1:]]
    found += [Case(d, h, use=use) for d in (BF16, FP16, FP32) for h in (64, 128) for use in USES[1:]]
    found += [Case(BF16, 64, kind, use) for kind in ("huge", "edge") for use in USES[1:]]
    found += [
        Case(d, 64, use=use, lengths=(20, 1, 130), keys=(170, 65, 300), offsets=(150, 70, -3))
        for d in (BF16, FP16)
        for use in ("o", "carried")
    ]
    found += [Case(d, 64, heads=(8, 1)) for d in (BF16, FP16)]
    # More than 16,384 keys: backward works in slices.
    found += [Case(BF16, 64, kind, heads=(1, 1), lengths=(17000,)) for kind in ("normal", "low")]
    return found + [case._replace(skip_below=SKIP) for case in found if case.use in ("o", "remainder")]
