"""Small tensors from the host to a GPU that is still at work."""

import torch
from torch import Tensor


def upload(x: Tensor, device: torch.device) -> Tensor:
    """x on `device`. Through page-locked memory, so that the host need not wait for what the GPU was given before."""
    return x.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else x.to(device)
