"""Scalable-Softmax (SSMax), arXiv:2501.19399."""

import torch
from torch import Tensor, nn

from kernels.ssmax import query_factor
from ssscale.attention.softmax import SoftmaxCore
from ssscale.config.schema import ModelConfig, SSMaxVariant
from ssscale.layout import PackedLayout
from ssscale.parallel.groups import Groups
from ssscale.parallel.megatron import mark_split
from ssscale.position import Tables


def query_base(layout: PackedLayout, window: int | None, pn: Tensor | None) -> Tensor:
    """ln n of each token (Eq. 2), or p_n (Eq. 3) from pn [length], of which the last stands for all larger n: [T] float32.

    n counts the keys that the token sees within its document, at most `window`. It is the same for all layers and heads:
    computed once a batch.
    """
    n = layout.num_visible_keys(window)
    if pn is None:
        return n.float().log()  # float32: bf16 rounds ln 1000 and ln 1010 to one value
    return pn.float()[(n.clamp(max=pn.numel()) - 1).long()]


class SSMaxCore(SoftmaxCore):
    """p_j = n^(s z_j) / Σ_m n^(s z_m) = softmax((s ln n) z)_j   (Eq. 2)

    s is learned per layer and head, or fixed; `bias` replaces s ln n by s ln n + b (Eq. 4), `pn` by s p_n + b with p_n
    shared by all layers and heads (Eq. 3). Scaling q is exact, so any softmax kernel serves unchanged.
    """

    def __init__(self, config: ModelConfig, groups: Groups) -> None:
        super().__init__(config, groups)
        attention, heads = config.attention, config.num_heads // groups.tensor_size
        self.heads = heads
        self.s: nn.Parameter | float = attention.ssmax_scale
        self.b: nn.Parameter | None = None
        if attention.ssmax != SSMaxVariant.fixed:
            self.s = nn.Parameter(torch.full((heads,), attention.ssmax_scale))
            mark_split(self.s, 0, (config.num_heads,))
        if attention.ssmax in (SSMaxVariant.bias, SSMaxVariant.pn):
            self.b = nn.Parameter(torch.full((heads,), attention.ssmax_bias))
            mark_split(self.b, 0, (config.num_heads,))

    def factor_parameters(self, tables: Tables) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        assert tables.base is not None
        s = self.s if isinstance(self.s, Tensor) else tables.base.new_full((self.heads,), self.s)
        return tables.base, s, self.b

    def query_factor(self, tables: Tables) -> Tensor | None:
        return query_factor(*self.factor_parameters(tables))
