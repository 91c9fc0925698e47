"""The optimizer step over flat buffers: checks, and the choice of the path."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from .segment import Segment, check_flat
from .settings import Settings
from .torch_path import TorchPath

__all__ = ["FlatAdamW", "Segment", "Settings", "clip_factor"]


class FlatAdamW:
    """AdamW on fixed segments: Triton kernels on a GPU, torch on a CPU.

    A step is three calls. None of them waits for the GPU:

        total = optimizer.sum_of_squares(gradients)       # add the totals of all ranks here
        norm, factor = clip_factor(total, max_norm)
        optimizer.update(gradients, settings, factor)     # changes nothing if the norm is not finite

    Raises ValueError for empty segments and for segments on several devices. Segments must not overlap.
    """

    def __init__(self, segments: Sequence[Segment]) -> None:
        if not segments:
            raise ValueError("FlatAdamW needs at least one segment")
        for segment in segments:
            if segment.master.numel() == 0 or segment.master.device != segments[0].master.device:
                raise ValueError("every segment must have at least one element, and all must be on the same device")
        self.segments = tuple(segments)
        if segments[0].master.device.type == "cuda":
            from .launch import TritonPath  # CPUs need no Triton

            self.path: TritonPath | TorchPath = TritonPath(segments)
        else:
            self.path = TorchPath(segments)

    def sum_of_squares(self, gradients: Sequence[Tensor], parts: int = 1) -> Tensor:
        """Returns Σ g² over the counted segments, [] float32, the same bits at every call.

        gradients: `parts` [n] tensors per segment, segment by segment, all float32 or all bfloat16. The gradient g of a
            segment is their sum in float32, in their order (`summed`).
        """
        self._check(gradients, parts)
        return self.path.sum_of_squares(gradients, parts)

    def update(self, gradients: Sequence[Tensor], settings: Sequence[Settings], factor: Tensor, parts: int = 1) -> None:
        """Updates all segments in place. settings: of each group. factor: [] float32 from `clip_factor`.

        gradients, parts: as for `sum_of_squares`.
        """
        for _ in self.update_in_turn(gradients, settings, factor, parts, [range(len(self.segments))]):
            pass

    def update_in_turn(
        self,
        gradients: Sequence[Tensor],
        settings: Sequence[Settings],
        factor: Tensor,
        parts: int,
        runs: Sequence[range],
    ) -> Iterator[range]:
        """Updates some segments after others, with one launch for each run of segments. Yields each run after its launch.

        runs: which segments; together, each segment once. A run may be empty.
        """
        self._check(gradients, parts)
        if len(settings) <= max(segment.group for segment in self.segments):
            raise ValueError(f"there are {len(settings)} settings, and a segment of a later group")
        if sorted(i for run in runs for i in run) != list(range(len(self.segments))):
            raise ValueError(f"the runs must have each of the {len(self.segments)} segments once")
        return self.path.update(gradients, settings, factor, parts, runs)

    def _check(self, gradients: Sequence[Tensor], parts: int) -> None:
        if len(gradients) != parts * len(self.segments):
            of = f" of {parts} parts" if parts != 1 else ""
            raise ValueError(f"there are {len(gradients)} gradients for {len(self.segments)} segments{of}")
        for i, gradient in enumerate(gradients):
            check_flat("gradient", gradient, self.segments[i // parts].master)
            if gradient.dtype != gradients[0].dtype or gradient.dtype not in (torch.float32, torch.bfloat16):
                raise ValueError(f"gradients must be all float32 or all bfloat16, not {gradient.dtype}")


def clip_factor(total: Tensor, max_norm: float) -> tuple[Tensor, Tensor]:
    """Returns (norm, factor), both [] float32: √total, and what gradients are multiplied by.

    factor = min(1, max_norm / (norm + 1e-6)), 1 if max_norm is 0, and NaN if the norm is NaN or Inf.
    """
    norm = total.sqrt()
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0) if max_norm > 0 else torch.ones_like(norm)
    return norm, torch.where(norm.isfinite(), factor, torch.nan)
