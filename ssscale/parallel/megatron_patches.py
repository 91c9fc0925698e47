"""Changes to Megatron-core 0.16.1, and to torch because of it.

Megatron-core is imported here alone; other modules take from here what they use of it.
"""

import contextlib
from collections.abc import Iterator

import torch

__all__ = ["TransformerConfig", "apply", "initialize_rng_tracker", "parallel_state", "tensor_parallel"]


@contextlib.contextmanager
def _nothing_compiled() -> Iterator[None]:
    """Leaves out the torch.compile of Megatron-core's fused activations and losses, none of which we call.

    torch.compile would import Dynamo and Inductor to decorate them, which takes 2 seconds.
    """
    compiler = torch.compile
    torch.compile = lambda function: function
    try:
        yield
    finally:
        torch.compile = compiler


with _nothing_compiled():
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.tensor_parallel import layers
    from megatron.core.tensor_parallel.random import initialize_rng_tracker
    from megatron.core.transformer.transformer_config import TransformerConfig


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
