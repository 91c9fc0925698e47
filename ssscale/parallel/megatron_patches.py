"""Changes to Megatron-core 0.16.1, and to torch because of it."""

import torch
from megatron.core.tensor_parallel import layers


def apply() -> None:
    """Applies all changes. A second call has no effect."""
    if not torch.cuda.is_available():
        _allocate_on_the_cpu()
    _silence_untraceable_warning()


def _allocate_on_the_cpu() -> None:
    """Lets sequence parallelism run on CPUs.

    Megatron-core allocates its buffers on torch.cuda.current_device(), which raises an error without a GPU.
    """
    torch.cuda.current_device = lambda: torch.device("cpu")


def _silence_untraceable_warning() -> None:
    """Disables the warning about CUDA_DEVICE_MAX_CONNECTIONS, which Dynamo cannot trace."""
    layers.linear_with_grad_accumulation_and_async_allreduce.warned = True
