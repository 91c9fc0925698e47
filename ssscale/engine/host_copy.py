"""Reads small results of a GPU without waiting for what it computes after them."""

import torch
from torch import Tensor

_streams: dict[torch.device, torch.cuda.Stream] = {}  # one per GPU, for all copies


class HostCopy:
    """A copy of a tensor in host memory, made as soon as the tensor is computed.

    `tensor.tolist()` waits for everything that has been launched, because the copy is the last in the queue. This copy has a
    stream of its own. So the host can read the gradient norm while the GPU still updates the weights, and has launched the
    next step when the update ends.
    """

    def __init__(self, tensor: Tensor) -> None:
        """tensor: on a GPU, the result of what the current stream has been given so far. On a CPU it is kept as it is."""
        self._tensor, self._done = tensor, None
        if tensor.device.type != "cuda":
            return
        stream = _streams.setdefault(tensor.device, torch.cuda.Stream(tensor.device))
        stream.wait_stream(torch.cuda.current_stream(tensor.device))
        with torch.cuda.stream(stream):
            self._tensor = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._tensor.copy_(tensor, non_blocking=True)
            tensor.record_stream(stream)  # keeps its memory until the copy is done
            self._done = stream.record_event()

    def read(self) -> Tensor:
        """Waits for the copy, and returns it."""
        if self._done is not None:
            self._done.synchronize()
        return self._tensor
