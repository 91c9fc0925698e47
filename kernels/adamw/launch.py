"""Launches the kernels: the tables that they read, and their launch settings."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import triton.language as tl
from ssscale_kernels.upload import upload
from torch import Tensor

from .kernels import squares_kernel, total_kernel, update_kernel
from .segment import Segment
from .settings import Settings, constants

ALIGNMENT = 16  # bytes of a vector access
TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16}  # of gradients


class Tiling(NamedTuple):
    """The launch settings: `chunk` elements per program, `block` of them at a time. `squares_*` are those of the norm.

    The defaults are the fastest of those measured on an H200 (README.md).
    """

    # At most four elements per thread: with eight, float32 and bf16 tensors would want different layouts, and every result
    # would pass through shared memory.
    chunk: int = 4096
    block: int = 512
    num_warps: int = 8
    squares_chunk: int = 16384
    squares_block: int = 1024  # eight elements per thread: 16 bytes of a bf16 gradient
    squares_warps: int = 4


class Chunks:
    """How programs divide segments: `segment_of` [num_chunks] and `first_chunk` [segments], both int32 on `device`."""

    def __init__(self, sizes: Tensor, chunk: int, device: torch.device) -> None:
        """sizes: elements of each segment, int64 on the CPU. Raises ValueError if they need 2^31 programs or more."""
        chunks = -(-sizes // chunk)
        ends = chunks.cumsum(0)
        self.chunk, self.num_chunks = chunk, int(ends[-1])
        self.bounds = [0, *ends.tolist()]  # chunks [bounds[i], bounds[i + 1]) are those of segment i
        if self.num_chunks >= 2**31:
            raise ValueError(f"{int(sizes.sum()):,} elements are too many for one launch")
        self.first_chunk = (ends - chunks).to(device, torch.int32)
        self.segment_of = torch.arange(len(sizes)).repeat_interleave(chunks).to(device, torch.int32)


EXACT = {"enable_fp_fusion": False}  # of the update: a product and a sum are two roundings, as in `adamw_reference`
TOTAL_WIDTH, TOTAL_WARPS = 4096, 16  # of the program that adds the sums of all chunks


class TritonPath:
    """The kernels on fixed segments. Only gradients and settings may change from step to step."""

    def __init__(self, segments: Sequence[Segment], tiling: Tiling | None = None) -> None:
        self.tiling = tiling or Tiling()
        self.device = segments[0].master.device
        sizes = torch.tensor([segment.master.numel() for segment in segments])
        self.chunks = Chunks(sizes, self.tiling.chunk, self.device)
        self.squares_chunks = Chunks(sizes, self.tiling.squares_chunk, self.device)
        state = [[getattr(segment, name) for segment in segments] for name in Segment.TENSORS]
        addresses = [[tensor.data_ptr() for tensor in tensors] for tensors in state]
        self.aligned = all(address % ALIGNMENT == 0 for row in addresses for address in row)
        # The segments must outlive the tables of their addresses.
        self.segments = tuple(segments)

        def table(values: Any, dtype: torch.dtype) -> Tensor:
            return torch.as_tensor(values, dtype=dtype).to(self.device)

        self.addresses = table(addresses, torch.int64)
        self.sizes = table(sizes, torch.int64)
        self.group_of = table([segment.group for segment in segments], torch.int32)
        self.counted = table([segment.counted for segment in segments], torch.int32)
        self.sums = torch.empty(self.squares_chunks.num_chunks, dtype=torch.float32, device=self.device)
        self.gradient_addresses: list[int] = []
        self.gradients = torch.empty(0, dtype=torch.int64, device=self.device)

    def sum_of_squares(self, gradients: Sequence[Tensor], parts: int = 1) -> Tensor:
        total = torch.empty((), dtype=torch.float32, device=self.device)
        chunks, tiling = self.squares_chunks, self.tiling
        tables = (self.sizes, chunks.segment_of, chunks.first_chunk, self.counted)
        options = self._options(gradients, parts, tiling.squares_chunk, tiling.squares_block, tiling.squares_warps)
        squares_kernel[(chunks.num_chunks,)](self._gradients(gradients), *tables, self.sums, **options)
        total_kernel[(1,)](self.sums, total, chunks.num_chunks, WIDTH=TOTAL_WIDTH, num_warps=TOTAL_WARPS)
        return total

    def update(
        self,
        gradients: Sequence[Tensor],
        settings: Sequence[Settings],
        factor: Tensor,
        parts: int,
        runs: Sequence[range],
    ) -> Iterator[range]:
        values = upload(torch.tensor([constants(group) for group in settings], dtype=torch.float64), self.device)
        chunks, tiling = self.chunks, self.tiling
        tables = (self.addresses, self._gradients(gradients), self.sizes, chunks.segment_of, chunks.first_chunk)
        options = self._options(gradients, parts, tiling.chunk, tiling.block, tiling.num_warps)
        for run in runs:
            begin, end = chunks.bounds[run.start], chunks.bounds[run.stop]
            if begin < end:
                more = (self.group_of, values, factor, len(self.segments), begin)
                update_kernel[(end - begin,)](*tables, *more, **options, **EXACT)
            yield run

    def _gradients(self, gradients: Sequence[Tensor]) -> Tensor:
        """The table of the gradients' addresses. Most often they are those of the step before."""
        addresses = [gradient.data_ptr() for gradient in gradients]
        if addresses != self.gradient_addresses:
            self.gradients = upload(torch.tensor(addresses, dtype=torch.int64), self.device)
            self.gradient_addresses = addresses
        return self.gradients

    def _options(
        self, gradients: Sequence[Tensor], parts: int, chunk: int, block: int, num_warps: int
    ) -> dict[str, Any]:
        aligned = self.aligned and all(gradient.data_ptr() % ALIGNMENT == 0 for gradient in gradients)
        return {
            "GRADIENT": TYPES[gradients[0].dtype],
            "PARTS": parts,
            "ALIGNED": aligned,
            "CHUNK": chunk,
            "BLOCK": block,
            "num_warps": num_warps,
        }
