"""RMSNorm."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ssscale.parallel.groups import Groups
from ssscale.parallel.megatron import replicated


class RMSNorm(nn.Module):
    """y = x / sqrt(mean(x²) + ε) · w over the last dimension   (arXiv:1910.07467, Eq. 4)

    partial: each tensor-parallel rank sees a part of the tokens (sequence parallelism), so w's gradient is summed over them.
    """

    def __init__(self, size: int, eps: float, groups: Groups, partial: bool) -> None:
        super().__init__()
        self.eps, self.groups, self.partial = eps, groups, partial
        self.weight = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        weight = replicated(self.weight, self.groups) if self.partial else self.weight
        return F.rms_norm(x, (x.shape[-1],), weight, self.eps)
