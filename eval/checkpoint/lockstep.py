"""Ranks whose forward passes need each other: under ZeRO-3 every one gathers the weights layer by layer from all."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from ssscale.layout import PackedLayout
from ssscale.model.decoder import Decoder


@contextmanager
def lockstep(model: Decoder) -> Iterator[None]:
    """Inside, a rank may make any number of passes over anything: whoever is done makes empty ones until all are."""
    groups = model.groups

    def working(ranks: int) -> bool:
        """Before each pass, and before each that a rank which is done makes: whether any rank still has one of its own."""
        total = torch.tensor(ranks, device=groups.device)
        dist.all_reduce(total, group=groups.replica_group)
        return bool(total)

    # First of all hooks: DeepSpeed's gather weights.
    hook = model.register_forward_pre_hook(lambda *_: working(1) and None, prepend=True)
    try:
        yield
    finally:
        hook.remove()
    tokens = torch.zeros(groups.tensor_size, dtype=torch.int64, device=groups.device)
    layout = PackedLayout.from_lengths([groups.tensor_size]).to(groups.device)
    with torch.no_grad():
        while working(0):
            model(tokens, layout, rows=tokens[:1])
