"""Biases of the query, key and value projections, and norms of q and k. T tokens, N and K heads of a rank, H dimensions."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size
from vllm.model_executor.utils import set_weight_attrs

from .config import Model


class Projections(nn.Module):
    """Adds biases to q, k and v, and then norms each head of q and k, as the model has them.

    Weights are held in float32 whatever the dtype of the model, and each operation rounds once to that dtype.
    """

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.biased, self.normed = model.qkv_bias, model.qk_norm
        self.head_dim, self.eps = model.head_dim, model.norm_eps
        ranks = get_tensor_model_parallel_world_size()
        for name, (size,) in model.projection_weights().items():
            heads = size // model.head_dim
            # Norms have one head, which all ranks hold. If there are fewer key heads than ranks, ranks share them.
            local = max(1, heads // ranks) * model.head_dim
            weight = nn.Parameter(torch.ones(local, dtype=torch.float32), requires_grad=False)
            set_weight_attrs(weight, {"weight_loader": _loader(heads, model.head_dim)})
            self.register_parameter(name, weight)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q: [T, N, H]; k, v: [T, K, H]."""
        own = dict(self.named_parameters())
        if self.biased:
            q, k, v = (
                x + own[f"{name}_bias"].to(x.dtype).unflatten(0, (-1, self.head_dim))
                for name, x in (("q", q), ("k", k), ("v", v))
            )
        if self.normed:
            q, k = (
                F.rms_norm(x.float(), (self.head_dim,), own[f"{name}_norm"], self.eps).to(x.dtype)
                for name, x in (("q", q), ("k", k))
            )
        return q, k, v


def _loader(heads: int, head_dim: int) -> Any:
    """Returns a function that fills a weight with this rank's heads of the whole weight."""

    def load(weight: Tensor, whole: Tensor) -> None:
        first = get_tensor_model_parallel_rank() * heads // get_tensor_model_parallel_world_size()
        if whole.shape[0] != heads * head_dim:
            raise ValueError(f"a weight of the projections has {whole.shape[0]} elements, not {heads * head_dim}")
        weight.data.copy_(whole.narrow(0, first * head_dim, weight.shape[0]))

    return load
