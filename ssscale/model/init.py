"""Weight initialisation, which does not depend on the parallel layout."""

import zlib

import torch
from torch import nn

from ssscale.config.schema import ModelConfig
from ssscale.model.decoder import VOCAB_WEIGHTS
from ssscale.parallel.groups import Groups
from ssscale.parallel.splits import global_shape, local_part


@torch.no_grad()
def initialize_weights(model: nn.Module, config: ModelConfig, groups: Groups, seed: int) -> None:
    """Draws matrices from N(0, σ²). σ is init_std for embedding and head, init_std / matrix_init_divisor for the
    others.

    With `depth_scaled_init`, σ of matrices that write to the residual stream is also divided by sqrt(2 · num_layers).
    Neither paper states its initialisation. This is GPT-2's rule (Radford et al. 2019, Section 2.3). With width
    transfer, it is also the rule of the stick-breaking paper's trainer (dolomite-engine, `init_method: mup`).

    Norms start at one. Weights of mixers and position methods start as they declare. Each weight is drawn whole, with a
    seed derived from `seed` and its name, and then sliced, so tensor parallelism does not change it.
    """
    for name, weight in model.named_parameters():
        declared = getattr(weight, "declared", None)
        bound = declared.bound if declared is not None else None
        if bound is None and (declared is not None or weight.dim() < 2):
            continue  # already holds its start value
        std = config.init_std
        if name not in VOCAB_WEIGHTS:
            std /= config.matrix_init_divisor
        if config.depth_scaled_init and name.endswith((".attention.out.weight", ".mlp.down.weight")):
            std /= (2 * config.num_layers) ** 0.5
        generator = torch.Generator(device=weight.device).manual_seed(seed * 1_000_003 + zlib.crc32(name.encode()))
        whole = torch.zeros(global_shape(weight, groups.tensor_size), device=weight.device)
        drawn = whole[: config.vocab_size] if name in VOCAB_WEIGHTS else whole  # padding depends on the layout
        if bound is None:
            drawn.normal_(0.0, std, generator=generator)
        else:
            drawn.uniform_(-bound, bound, generator=generator)
        weight.copy_(local_part(whole, weight, groups.tensor_rank, groups.tensor_size))
