"""Applies a function to whole matrices that tensor parallelism and ZeRO stage 1 have divided over the ranks.

Every matrix has an owner among all ranks. In each round, every rank owns at most one matrix: the ranks send their parts
of it to the owner, the owner computes, and the parts of the result go back. The parts of the next round travel while this
round computes. The matrices are divided over the owners by the cost of Newton-Schulz, largest first.

The owner sees the same matrix in every parallel layout, so the result has the same bits. What travels per rank is
2 · (parameters / ranks) elements, much less than the weights that ZeRO gathers.

If every node holds copies of all parts (`parallel.shard_within`), the owner takes them from the ranks of its own node, and the
result goes to the ranks of all nodes. Matrices are still divided over all ranks, and copies get the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ssscale.parallel.exchange import gather_json
from ssscale.parallel.groups import Groups
from ssscale.parallel.splits import split_dim


@dataclass(frozen=True)
class Matrix:
    """A whole matrix: a weight, or one of the matrices that a weight stacks.

    dim: along which tensor parallelism splits it. shares: number of these shares, each of rows · columns / shares
    elements.
    """

    rows: int
    columns: int
    dim: int
    shares: int

    @property
    def cost(self) -> float:
        """Multiplications of a step of Newton-Schulz, up to a factor."""
        short, long = sorted((self.rows, self.columns))
        return float(2 * short * short * long + short**3)

    def joined(self, shares: Tensor) -> Tensor:
        """Returns the matrix [rows, columns] of its flattened shares [shares, rows · columns / shares]."""
        if self.dim == 0:
            return shares.view(self.rows, self.columns)
        return shares.view(self.shares, self.rows, -1).transpose(0, 1).reshape(self.rows, self.columns)

    def divided(self, whole: Tensor) -> Tensor:
        """The inverse of `joined`."""
        if self.dim == 0:
            return whole.reshape(self.shares, -1)
        return whole.reshape(self.rows, self.shares, -1).transpose(0, 1).reshape(self.shares, -1)


@dataclass(frozen=True)
class Part:
    """What this rank's partition of a parameter group has of a matrix.

    Elements [start, start + size) of the flattened share are elements [offset, offset + size) of the partition.
    """

    matrix: int
    group: int
    start: int
    offset: int
    size: int


@dataclass(frozen=True)
class Round:
    """One matrix per owner. All lists are by rank.

    parts: this rank's part of the matrix that the rank owns. own: the matrix of this rank, if any. held: share, start
    and size of what the rank has of it.
    near: whether the rank's parts come from here, and those of this rank from there. Results go everywhere.
    """

    parts: list[Part | None]
    own: Matrix | None
    held: list[tuple[int, int, int]]
    near: list[bool]

    @property
    def sent(self) -> list[int]:
        """The number of elements that each rank gets of this rank's inputs."""
        return [part.size if part is not None and near else 0 for part, near in zip(self.parts, self.near, strict=True)]

    @property
    def received(self) -> list[int]:
        """The number of elements that this rank gets of each rank's inputs."""
        return [size if near else 0 for (_, _, size), near in zip(self.held, self.near, strict=True)]


def find_matrices(optimizer: Any, groups: Groups) -> tuple[list[Matrix], list[Part]]:
    """Returns all matrices, in the same order on all ranks, and the parts of them that this rank holds.

    optimizer: DeepSpeed's BF16_Optimizer over parameter groups with the key `matrix`.
    """
    matrices: list[Matrix] = []
    parts: list[Part] = []
    for number, (weights, group) in enumerate(zip(optimizer.bf16_groups, optimizer.optimizer.param_groups)):
        for weight in weights if group["matrix"] else []:
            begin, end, offset = _held(weight)
            at = 0  # in the flattened local weight, which stacks a share of each stripe
            for matrix in _stripes(weight, groups.tensor_size):
                size = matrix.rows * matrix.columns // matrix.shares
                first, last = max(begin, at), min(end, at + size)
                if first < last:
                    parts.append(Part(len(matrices), number, first - at, offset + first - begin, last - first))
                matrices.append(matrix)
                at += size
            assert at == weight.numel()
    return matrices, parts


def _held(weight: Tensor) -> tuple[int, int, int]:
    """Returns [begin, end) of the flattened weight that this rank's partition holds, and where they begin in it."""
    mapping = weight._hp_mapping
    if mapping is None:
        return 0, 0, 0
    begin = mapping.lp_fragment_address.start
    return begin, begin + mapping.lp_fragment_address.numel, mapping.get_hp_fragment_address().start


def _stripes(weight: Tensor, tensor_size: int) -> list[Matrix]:
    dim, stripes = split_dim(weight), weight.stripes
    if dim == 0:
        return [Matrix(stripe, weight.shape[1], 0, tensor_size) for stripe in stripes]
    assert (dim, len(stripes)) == (1, 1), "a stripe along the second dimension would not be contiguous"
    return [Matrix(weight.shape[0], stripes[0], 1, tensor_size)]


def owners(matrices: Sequence[Matrix], ranks: int) -> list[list[int]]:
    """Returns the matrices of each rank, the most expensive one first. Each goes to the rank with the least cost so far."""
    found: list[list[int]] = [[] for _ in range(ranks)]
    costs = [0.0] * ranks
    for number in sorted(range(len(matrices)), key=lambda number: (-matrices[number].cost, number)):
        rank = min(range(ranks), key=lambda rank: (costs[rank], rank))
        found[rank].append(number)
        costs[rank] += matrices[number].cost
    return found


class WholeMatrices:
    """The plan of the exchange, made once, and its execution. All ranks construct it and call `map` together."""

    def __init__(self, matrices: list[Matrix], parts: list[Part], groups: Groups) -> None:
        """groups: every rank of the run holds parts, so the exchange is among all of them."""
        self.matrices, self.rank, self.size, self.device = matrices, groups.rank, groups.world_size, groups.device
        held = [(part.matrix, groups.tensor_rank, part.start, part.size) for part in parts]
        answers = gather_json([groups.shards.copy_rank, held])
        self.near = [copy == groups.shards.copy_rank for copy, _ in answers]
        every = [{matrix: (share, start, size) for matrix, share, start, size in found} for _, found in answers]
        for number, matrix in enumerate(matrices):
            sizes = [found[number][2] for found, near in zip(every, self.near) if near and number in found]
            assert sum(sizes) == matrix.rows * matrix.columns, f"matrix {number}: parts of {sizes} elements"
        own = {part.matrix: part for part in parts}
        of = owners(matrices, self.size)
        self.rounds = [self._round(number, of, own, every) for number in range(max(map(len, of)))]

    def _round(
        self, number: int, of: list[list[int]], own: dict[int, Part], every: list[dict[int, tuple[int, int, int]]]
    ) -> Round:
        owned = [found[number] if number < len(found) else None for found in of]
        mine = owned[self.rank]
        return Round(
            parts=[None if matrix is None else own.get(matrix) for matrix in owned],
            own=None if mine is None else self.matrices[mine],
            held=[(0, 0, 0) if mine is None else found.get(mine, (0, 0, 0)) for found in every],
            near=self.near,
        )

    def map(
        self,
        inputs: Sequence[Tensor | None],
        dtype: torch.dtype,
        function: Callable[[Tensor], Tensor],
        use: Callable[[Matrix, Part, Tensor], None],
    ) -> None:
        """Calls use(matrix, part, values) for each part of this rank, with its values of function(matrix).

        inputs: by parameter group, this rank's partition [n]; None for groups without matrices.
        dtype: to which inputs are rounded before they are sent. function: from [rows, columns] to the same shape and dtype.
            Its result may be overwritten by the next call.
        """
        arriving = self._gather(0, inputs, dtype) if self.rounds else None
        leaving = None
        for number, step in enumerate(self.rounds):
            assert arriving is not None
            following = self._gather(number + 1, inputs, dtype) if number + 1 < len(self.rounds) else None
            result = self._compute(step, arriving.wait(), function)
            if leaving is not None:
                self._use(self.rounds[number - 1], leaving.wait(), use)
            leaving = self._scatter(step, result)
            arriving = following
        if leaving is not None:
            self._use(self.rounds[-1], leaving.wait(), use)

    def _gather(self, number: int, inputs: Sequence[Tensor | None], dtype: torch.dtype) -> Exchanged:
        step = self.rounds[number]
        sent = torch.empty(sum(step.sent), dtype=dtype, device=self.device)
        for part, place in zip(step.parts, sent.split(step.sent), strict=True):
            if part is not None and len(place):
                source = inputs[part.group]
                assert source is not None
                place.copy_(source.narrow(0, part.offset, part.size))
        return self._exchange(sent, step.sent, step.received)

    def _compute(self, step: Round, received: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
        """Returns the parts of the result, by the ranks that hold them."""
        matrix = step.own
        if matrix is None:
            return received
        shares = received.new_empty(matrix.shares, matrix.rows * matrix.columns // matrix.shares)
        for (share, start, _), values in zip(step.held, received.split(step.received), strict=True):
            shares[share, start : start + len(values)] = values
        divided = matrix.divided(function(matrix.joined(shares)))
        return torch.cat([divided[share, start : start + size] for share, start, size in step.held])

    def _scatter(self, step: Round, result: Tensor) -> Exchanged:
        return self._exchange(result, [size for _, _, size in step.held], _sizes(step.parts))

    def _use(self, step: Round, values: Tensor, use: Callable[[Matrix, Part, Tensor], None]) -> None:
        for part, own in zip(step.parts, values.split(_sizes(step.parts)), strict=True):
            if part is not None:
                use(self.matrices[part.matrix], part, own)

    def _exchange(self, sent: Tensor, sizes: list[int], received: list[int]) -> Exchanged:
        """Starts to send `sizes` elements to each rank and to receive `received` elements of each."""
        if self.size == 1:
            return Exchanged(None, sent, sent)
        result = sent.new_empty(sum(received))
        work = dist.all_to_all_single(result, sent, received, sizes, async_op=True)
        return Exchanged(work, sent, result)


@dataclass(frozen=True)
class Exchanged:
    """An exchange that has been started. sent: kept until it ends."""

    work: dist.Work | None
    sent: Tensor
    result: Tensor

    def wait(self) -> Tensor:
        if self.work is not None:
            self.work.wait()
        return self.result


def _sizes(parts: list[Part | None]) -> list[int]:
    return [0 if part is None else part.size for part in parts]
