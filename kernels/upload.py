"""Copies small tensors from the host to a GPU without waiting for it."""

import torch
from torch import Tensor


def upload(x: Tensor, device: torch.device) -> Tensor:
    """x on `device`. From page-locked memory, because the host would else wait for all work that the GPU has queued."""
    return x.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else x.to(device)
