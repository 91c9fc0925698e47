"""Muon and AdamW on the flat fp32 partitions of ZeRO stage 1 (`ssscale.optim.muon` has the equations)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ssscale.engine.matrices import Matrix, Part, WholeMatrices

if TYPE_CHECKING:
    from ssscale.optim.muon import Muon

COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of torch.optim.Muon and of Keller Jordan's Muon
EPS = 1e-7  # smallest norm by which a matrix is divided, as in torch.optim.Muon
CHUNK = 2**24  # elements of a momentum in bf16 that are converted to fp32 at a time


def newton_schulz(matrix: Tensor, steps: int) -> Tensor:
    """Returns the matrix with singular values between about 0.7 and 1.2, in its dtype: X ← a X + (b A + c A²) X, A = X Xᵀ.

    matrix: [rows, columns]; it is not changed. X starts as matrix / |matrix|. The singular values of small ones reach
    the range only if they are larger than about 1e-3 · |matrix| (with 5 steps). Operations and their order are those of
    `torch.optim.Muon`, so that results have the same bits.
    """
    a, b, c = COEFFICIENTS
    tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.T if tall else matrix
    x = x / x.norm().clamp(min=EPS)
    for _ in range(steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if tall else x


@dataclass(frozen=True)
class Recorded:
    """A CUDA graph that writes to `found` what it computes from `given`."""

    given: Tensor
    found: Tensor
    graph: torch.cuda.CUDAGraph


class NewtonSchulz:
    """`newton_schulz` of `steps` steps, bit for bit. On a GPU it is a CUDA graph per shape and dtype.

    One launch then takes the place of about 30, which take the host longer than small matrices take the GPU. A result is
    overwritten by the next call.
    """

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self.recorded: dict[tuple[torch.Size, torch.dtype], Recorded] = {}
        self.pool: Any = None

    def __call__(self, matrix: Tensor) -> Tensor:
        if not matrix.is_cuda:
            return newton_schulz(matrix, self.steps)
        key = matrix.shape, matrix.dtype
        if key not in self.recorded:
            self.recorded[key] = self._record(matrix)
        recorded = self.recorded[key]
        recorded.given.copy_(matrix)
        recorded.graph.replay()
        return recorded.found

    def _record(self, matrix: Tensor) -> Recorded:
        """Shares the memory of the other shapes, whose results are used by then."""
        given = torch.empty_like(matrix, memory_format=torch.contiguous_format).copy_(matrix)
        newton_schulz(given, self.steps)  # what is set up at the first call is not recorded
        graph = torch.cuda.CUDAGraph()
        self.pool = self.pool or torch.cuda.graph_pool_handle()
        # NCCL's watchdog may ask for events meanwhile.
        with torch.cuda.graph(graph, pool=self.pool, capture_error_mode="thread_local"):
            found = newton_schulz(given, self.steps)
        return Recorded(given, found, graph)


class MuonAdamW(torch.optim.AdamW):
    """Updates the groups with `matrix` by Muon and the others by torch's fused AdamW.

    matrices: set by the engine once ZeRO has divided the weights. Each group then has one parameter, this rank's
        partition. The gradients of matrices are overwritten and dropped.
    """

    def __init__(self, groups: list[dict[str, Any]], kind: Muon) -> None:
        super().__init__(groups, lr=0.0, betas=tuple(kind.betas), eps=kind.eps, fused=True)
        self.kind = kind
        self.newton_schulz = NewtonSchulz(kind.newton_schulz_steps)
        self.matrices: WholeMatrices | None = None

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        updates = [self._look_ahead(group) if group["matrix"] else None for group in self.param_groups]
        assert self.matrices is not None, "the engine has not set `matrices`"
        dtype = getattr(torch, {"fp32": "float32", "bf16": "bfloat16"}[self.kind.newton_schulz_dtype])
        self.matrices.map(updates, dtype, self.newton_schulz, self._add)
        super().step()

    def _look_ahead(self, group: dict[str, Any]) -> Tensor:
        """Updates the momentum, applies weight decay, and returns u in the memory of the gradient."""
        (weight,) = group["params"]
        update, weight.grad = weight.grad, None  # without a gradient, AdamW skips the group
        if "exp_avg" not in self.state[weight]:
            self.state[weight] = self.kind.state_in(group, weight, 0)
        average = self.state[weight]["exp_avg"]
        if average.dtype == torch.float32:
            self._average(average, update)
        else:
            for rounded, part in zip(average.split(CHUNK), update.split(CHUNK), strict=True):
                rounded.copy_(self._average(rounded.float(), part))
        weight.mul_(1 - group["lr"] * group["weight_decay"])
        return update

    def _average(self, average: Tensor, gradient: Tensor) -> Tensor:
        """Moves `average` towards the gradient and writes u to the gradient. Returns `average`."""
        average.lerp_(gradient, 1 - self.kind.mu)
        if self.kind.nesterov:
            gradient.lerp_(average, self.kind.mu)
        else:
            gradient.copy_(average)
        return average

    def _add(self, matrix: Matrix, part: Part, values: Tensor) -> None:
        group = self.param_groups[part.group]
        size = group["lr"] * (self.kind.rms * max(matrix.rows, matrix.columns) ** 0.5)
        group["params"][0].narrow(0, part.offset, part.size).add_(values, alpha=-size)
