"""Scalable-Softmax (SSMax), arXiv:2501.19399."""

import torch
from torch import Tensor, nn

from ssscale.attention.softmax import SoftmaxCore
from ssscale.layout import PackedLayout
from ssscale.parallel.groups import Groups
from ssscale.parallel.megatron import mark_split, replicated
from ssscale.schema import ModelConfig, SSMaxVariant


class SSMaxCore(SoftmaxCore):
    """p_j = n^(s z_j) / Σ_m n^(s z_m) = softmax((s ln n) z)_j   (Eq. 2)

    n counts the keys that a query sees within its document. s is learned per layer and head, or fixed; `bias` replaces
    s ln n by s ln n + b (Eq. 4), `pn` by s p_n + b with p_n shared by all layers and heads (Eq. 3). Scaling q is exact,
    so any softmax kernel serves unchanged.
    """

    def __init__(self, config: ModelConfig, groups: Groups, shared: nn.Parameter | None = None) -> None:
        super().__init__(config, groups)
        attention, heads = config.attention, config.num_heads // groups.tensor_size
        self.groups = groups
        self.shared = [shared] if shared is not None else []  # a list: the parameter belongs to the decoder
        self.s: nn.Parameter | float = attention.ssmax_scale
        self.b: nn.Parameter | None = None
        if attention.ssmax != SSMaxVariant.fixed:
            self.s = nn.Parameter(torch.full((heads,), attention.ssmax_scale))
            mark_split(self.s, 0, (config.num_heads,))
        if attention.ssmax in (SSMaxVariant.bias, SSMaxVariant.pn):
            self.b = nn.Parameter(torch.full((heads,), attention.ssmax_bias))
            mark_split(self.b, 0, (config.num_heads,))

    def query_factor(self, layout: PackedLayout) -> Tensor:
        n = layout.num_visible_keys(self.window)
        if self.shared:
            p = replicated(self.shared[0], self.groups)
            base = p.float()[(n.clamp(max=p.numel()) - 1).long()]
        else:
            base = n.float().log()  # float32: bf16 rounds ln 1000 and ln 1010 to one value
        s = self.s.float() if isinstance(self.s, Tensor) else self.s
        factor = base[:, None] * s
        if self.b is not None:
            factor = factor + self.b.float()
        return factor
