"""Keeps forward passes of ranks in step. Under ZeRO-3, each pass gathers the weights of each layer from all ranks."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from ssscale.layout import PackedLayout
from ssscale.model.decoder import Decoder


@contextmanager
def lockstep(model: Decoder) -> Iterator[None]:
    """Let each rank make any number of passes of any size. Ranks that are done make empty passes until all are done."""
    groups = model.groups

    def working(ranks: int) -> bool:
        """Return whether any rank still has a pass of its own. Called before each pass, empty ones included."""
        total = torch.tensor(ranks, device=groups.device)
        dist.all_reduce(total, group=groups.replica_group)
        return bool(total)

    # Before all other hooks: those of DeepSpeed gather weights.
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
