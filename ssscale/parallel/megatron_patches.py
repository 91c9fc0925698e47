"""What is changed in Megatron-core (0.16.1), and in torch for its sake."""

import torch
from megatron.core.tensor_parallel import layers


def apply() -> None:
    """Apply all of them; a second call changes nothing."""
    if not torch.cuda.is_available():
        _allocate_on_the_cpu()
    _silence_untraceable_warning()


def _allocate_on_the_cpu() -> None:
    """Megatron-core allocates its sequence-parallel buffers on torch.cuda.current_device(), which raises without a GPU."""
    torch.cuda.current_device = lambda: torch.device("cpu")


def _silence_untraceable_warning() -> None:
    """The layers warn once per process about CUDA_DEVICE_MAX_CONNECTIONS, and Dynamo cannot trace the warning."""
    layers.linear_with_grad_accumulation_and_async_allreduce.warned = True
