"""The same interface by torch, for CPUs."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from .reference import summed
from .segment import Segment
from .settings import Settings


class TorchPath:
    """Norms as DeepSpeed computes them, one per segment; the update by `torch._fused_adamw_`."""

    def __init__(self, segments: Sequence[Segment]) -> None:
        self.segments = tuple(segments)

    def sum_of_squares(self, gradients: Sequence[Tensor], parts: int = 1) -> Tensor:
        counted = [summed(g).norm() for g, s in zip(_by_segment(gradients, parts), self.segments) if s.counted]
        if not counted:
            return torch.zeros((), device=gradients[0].device)
        return torch.stack(counted).pow(2).sum()

    def update(
        self,
        gradients: Sequence[Tensor],
        settings: Sequence[Settings],
        factor: Tensor,
        parts: int,
        runs: Sequence[range],
    ) -> Iterator[range]:
        by_segment, valid = _by_segment(gradients, parts), not factor.isnan()
        for run in runs:
            for i in run if valid else ():
                segment = self.segments[i]
                state = segment.master, segment.exp_avg, segment.exp_avg_sq
                fused_adamw(state, summed(by_segment[i]) * factor, settings[segment.group])
                segment.rounded.copy_(segment.master)
            yield run


def _by_segment(gradients: Sequence[Tensor], parts: int) -> list[Sequence[Tensor]]:
    return [gradients[i : i + parts] for i in range(0, len(gradients), parts)]


def fused_adamw(state: Sequence[Tensor], gradient: Tensor, settings: Settings) -> None:
    """Updates a weight and its two moments, which are `state`, in place. All are float32."""
    weight, exp_avg, exp_avg_sq = state
    lr, beta1, beta2, eps, weight_decay, step = settings
    torch._fused_adamw_(
        [weight],
        [gradient],
        [exp_avg],
        [exp_avg_sq],
        [],
        [torch.tensor(float(step), device=weight.device)],
        lr=lr,
        beta1=beta1,
        beta2=beta2,
        weight_decay=weight_decay,
        eps=eps,
        amsgrad=False,
        maximize=False,
    )
