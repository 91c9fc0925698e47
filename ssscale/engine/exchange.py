"""The data-parallel exchange of ZeRO stage 1, hidden behind computation (`parallel.overlap`).

A *bucket* is one parameter group of DeepSpeed. It has one flat buffer of fp32 gradients and one of weights. ZeRO divides
both evenly over the replicas, so that each rank owns a *partition* of each bucket. A step then runs as follows:

    backward, last microbatch   starts a reduce-scatter of each bucket once all of its gradients are there
    `reduced`                   starts the other buckets, and waits for all
    update                      norm, clipping and optimizer of this rank's partitions, cast to the weights' dtype
    `gather`                    starts an all-gather of each bucket's weights, as soon as that bucket is updated
    next forward pass           each part of the model waits for the buckets that it reads

All ranks start the same collectives in the same order: first the reductions, in the order in which backward usually
completes the buckets (`in_order`), then the gathers, in the order in which the forward pass reads the weights. A bucket
never overtakes another, whatever the order in which gradients arrive. Waiting means that the current CUDA stream waits;
the host goes on. On CPUs the host waits.

With `parallel.copy_engines` on one host, a step of one microbatch reduces nothing: backward sends each gradient to the ranks
that own a piece of it, `reduced` waits for all of them, and the update adds them (`ssscale.engine.direct`).

With `parallel.shard_within`, ZeRO divides the buffers over the replicas of one node, and every node holds all partitions.
Reduce-scatters and gathers stay within the node. Each reduce-scatter is followed by an all-reduce of the partition over the
nodes. It waits for the reduce-scatter on a stream of its own, so that computation and the next reduce-scatter go on.

The update is DeepSpeed's, or that of `ssscale.engine.update`. This file knows neither.
`ssscale.engine.deepspeed_patches` connects them.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ssscale.engine.direct import DirectGradients
from ssscale.model.decoder import Decoder
from ssscale.parallel.copies import Started, part, peers_of
from ssscale.parallel.groups import Groups
from ssscale.parallel.splits import split_dim


@dataclass(frozen=True)
class Bucket:
    """The flat buffers of a parameter group on this rank, padded to n elements. d: number of ranks that ZeRO divides over.

    parameters: in the order of their gradients in the buffers.
    gradients, weights: [n], float32 and the model's dtype. own_gradients, own_weights: [n / d], this rank's partitions,
    which are views of them. master: [n / d] float32, the weights that the optimizer updates.
    """

    parameters: Sequence[nn.Parameter]
    gradients: Tensor
    own_gradients: Tensor
    weights: Tensor
    own_weights: Tensor
    master: Tensor


def backward_order(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Returns the parameters approximately in the order in which backward computes their gradients.

    The decoder registers its modules in the order in which the forward pass reads them.
    """
    return list(model.named_parameters())[::-1]


def kind(weight: Tensor) -> bool:
    """True if every tensor-parallel rank holds the whole weight. All weights of a bucket have the same kind.

    The norm counts buckets of whole weights on the first of these ranks only, and the others on every rank.
    """
    return split_dim(weight) is None


def in_order(model: nn.Module, groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Sorts parameter groups by the last of their gradients, which completes the bucket."""
    place = {weight: number for number, (_, weight) in enumerate(backward_order(model))}
    return sorted(groups, key=lambda group: max(place[weight] for weight in group["params"]))


class Exchange:
    """Reduces the gradients of a step's last microbatch and gathers the updated weights.

    hidden: whether both run behind computation. If not, the same collectives run in the same order, and each is waited
    for at once. Tests compare the two, which must agree in every bit.
    """

    hidden = True

    def __init__(
        self,
        buckets: Sequence[Bucket],
        model: Decoder,
        groups: Groups,
        dtype: torch.dtype = torch.float32,
        copy_engines: bool = False,
    ) -> None:
        """buckets: in the order in which they are reduced. model: already compiled, if it is to be.

        dtype: in which gradients are sent and summed over the ranks. If not float32, each rank first rounds its sums to it.
        copy_engines: exchange by the copy engines of GPUs of one host (`ssscale.parallel.copies`), and sum in float32.
        """
        self.buckets, self.groups, self.dtype = buckets, groups, dtype
        self.group, self.copy_group = groups.shards.group, groups.shards.copy_group
        self.peers = peers_of(self.group, groups.device) if copy_engines else None
        # By bucket: the reduced gradients of this rank's partition, [n / d] float32.
        self.sums = [bucket.own_gradients for bucket in buckets]
        # One of these with `direct`. By bucket: the gradients in bf16 [n], and by weight the views of them.
        self.halves: list[Tensor] = []
        self.half_of: list[list[Tensor]] = []
        self.pushed: DirectGradients | None = None  # neither `halves` nor `sums`
        self.gathered = True  # whether a gather has followed the last `reduced` of `pushed`
        across = self.copy_group is not None and groups.device.type == "cuda"
        self.stream = torch.cuda.Stream(groups.device) if across else None  # waits for reduce-scatters
        # The buckets that count in the norm.
        self.counted = [i for i, b in enumerate(buckets) if groups.tensor_rank == 0 or not kind(b.parameters[0])]
        self.missing: list[set[int]] = []  # by bucket, the weights whose last gradient of the step has not come yet
        # The reductions that have been started, in the order of the buckets. Each with the tensor that gets the sums, and
        # the one that is sent, whose memory is needed until then.
        self.reducing: list[tuple[dist.Work | Started, Tensor, Tensor]] = []
        self.gathering: dict[int, dist.Work | Started] = {}  # by bucket, the gathers that nobody has waited for yet
        place = {weight: number for number, weight in enumerate(model.parameters())}
        numbers = range(len(buckets))
        self.forward_order = sorted(numbers, key=lambda i: min(place[weight] for weight in buckets[i].parameters))
        self.bucket_of = {weight: i for i, bucket in enumerate(buckets) for weight in bucket.parameters}
        call_before_parts(model, self._waiting_for)

    @property
    def direct(self) -> bool:
        """Whether gradients are kept and sent in bf16 (`set_direct`)."""
        return bool(self.halves) or self.pushed is not None

    def can_be_direct(self) -> bool:
        """Whether `set_direct` changes no bit of the sums of a step with one microbatch, for a model in bf16.

        Its gradients are in bf16 then. Copies are summed in float32 anyway, and with `dtype` bf16, they are sent in it.
        """
        return self.peers is not None or self.dtype == torch.bfloat16

    def set_direct(self, direct: bool, gradients: Sequence[Sequence[Tensor]]) -> None:
        """Sets whether gradients are kept in bf16, so that the caller may release the memory of the fp32 buffers. Collective.

        gradients: by bucket and weight, the views of the fp32 buffer. Of those without memory, only place and size are read.
        """
        if self.pushed is not None:
            self.pushed.close()
        self.halves, self.half_of, self.pushed = [], [], None
        self.sums = [bucket.own_gradients for bucket in self.buckets]
        if not direct:
            return
        places = [
            [(view.storage_offset() - bucket.gradients.storage_offset(), view.numel()) for view in views]
            for bucket, views in zip(self.buckets, gradients, strict=True)
        ]
        if self.peers is not None and self.copy_group is None:  # a sum that goes on to other nodes has to be in memory
            self.sums = []
            self.pushed = DirectGradients(self.peers, [len(bucket.master) for bucket in self.buckets], places)
            return
        self.halves = [torch.zeros_like(bucket.weights) for bucket in self.buckets]
        self.half_of = [
            [half.narrow(0, first, size) for first, size in found]
            for half, found in zip(self.halves, places, strict=True)
        ]
        self.sums = [torch.zeros_like(bucket.master) for bucket in self.buckets]

    @property
    def parts(self) -> int:
        """How many tensors `own_parts` returns."""
        return 1 if self.pushed is None else self.groups.shards.size

    def own_parts(self, bucket: int, weight: int, offset: int, size: int) -> list[Tensor]:
        """Returns the tensors [size] whose sum is the reduced gradient of a weight in this rank's partition.

        offset, size: where it is in the partition.
        """
        if self.pushed is None:
            return [self.sums[bucket].narrow(0, offset, size)]
        return self.pushed.own_parts(bucket, weight)

    def keep(self, bucket: int, weight: int, gradient: Tensor) -> None:
        """Keeps the gradient [n] of a weight in bf16, with `direct`. Nothing else may write to it before `let_go`."""
        if self.pushed is None:
            self.half_of[bucket][weight].copy_(gradient)
            return
        self.pushed.keep(bucket, weight, gradient)
        if self.hidden:
            self.pushed.push(bucket, weight)

    def let_go(self) -> None:
        """Lets go of the gradients of the step. The update, which reads them, has been launched."""
        if self.pushed is not None:
            self.pushed.clear()

    def begin(self, last: bool) -> None:
        """Announces a backward pass. last: whether it is the last one before the update."""
        assert self.gathered or not last, "another rank may still read the last gradients: no gather has followed them"
        if self.pushed is not None:
            self.wait()  # also for a bucket that no forward pass has read: its owner may still read the last gradients
        self.missing = [set(range(len(bucket.parameters))) for bucket in self.buckets] if last else []

    def accumulated(self, bucket: int, weight: int) -> None:
        """Notes that the gradient of a weight has been added to its bucket. Starts the buckets that are complete by now."""
        if not self.missing:
            return
        assert weight in self.missing[bucket], "a second gradient of a weight in one backward pass"
        self.missing[bucket].remove(weight)
        if not self.hidden or self.pushed is not None:
            return
        while len(self.reducing) < len(self.buckets) and not self.missing[len(self.reducing)]:
            self._reduce_next()

    def reduced(self) -> None:
        """Waits until all partitions hold the sums over the replicas, or what these are the sums of (`own_parts`).

        Does nothing unless the microbatch was the last one of the step.
        If a step did not use a weight, the reductions of its bucket and of the buckets after it only start now.
        """
        if not self.missing:
            return
        if self.pushed is not None:
            self.missing, self.gathered = [], False
            self.pushed.finish(push_all=not self.hidden)
            return
        while len(self.reducing) < len(self.buckets):
            self._reduce_next()
            if not self.hidden:
                self.reducing[-1][0].wait()
        for own, (work, sums, _) in zip(self.sums, self.reducing, strict=True):
            work.wait()
            if sums is not own:
                own.copy_(sums)
        self.reducing, self.missing = [], []

    def _reduce_next(self) -> None:
        number = len(self.reducing)
        whole, own = self.buckets[number].gradients, self.sums[number]
        if self.direct:
            whole = self.halves[number]
        elif self.dtype != torch.float32:
            whole = whole.to(self.dtype)
        work: dist.Work | Started
        if self.peers:
            work = self.peers.start_reduction(own, whole)
        else:
            if whole.dtype != own.dtype:
                own = part(whole, self.groups.shards.rank, self.groups.shards.size)
            work = reduce_scatter(own, whole, self.group)
        if self.copy_group is not None:
            with torch.cuda.stream(self.stream):  # None: has no effect
                work.wait()
                work = all_reduce(own, self.copy_group)
        self.reducing.append((work, own, whole))

    def grad_norm(self) -> Tensor:
        """Returns the L2 norm of the reduced gradients over the replicas, a float32 scalar.

        Gradients that all tensor-parallel ranks hold count on the first one only, so that the squares of all
        tensor-parallel ranks' norms add up to that of the whole gradient. If nodes hold copies of the shards, the first of
        these ranks returns the norm of the whole gradient and the others 0.
        """
        parts = [self.sums[number] for number in self.counted] or [self.sums[0][:0]]
        squares = sum_of_squares(parts)
        if self.copy_group is None:
            dist.all_reduce(squares, group=self.group)
        else:
            add_up(squares, self.groups)
            if self.groups.tensor_rank > 0:
                squares.zero_()
        return squares.sqrt().float()

    def gather(self) -> None:
        """Starts to send the updated weights: `own_weights` of each rank to all replicas."""
        for number in self.forward_order:
            self.gather_bucket(number)

    def gather_bucket(self, number: int) -> None:
        """`gather` for one bucket. Called for all of them in `forward_order`, as all ranks must have the same order."""
        self.gathered = number == self.forward_order[-1]
        bucket = self.buckets[number]
        whole, own = bucket.weights, bucket.own_weights
        work = self.peers.start_filling(whole, own) if self.peers else all_gather(whole, own, self.group)
        self.gathering[number] = work
        if not self.hidden:
            self.wait()

    def wait(self, numbers: Iterable[int] | None = None) -> None:
        """Waits until the weights of the buckets `numbers` are whole. None: of all buckets."""
        for number in list(self.gathering) if numbers is None else numbers:
            work = self.gathering.pop(number, None)
            if work is not None:
                work.wait()

    def _waiting_for(self, weights: Iterable[nn.Parameter]) -> Callable[[], None]:
        numbers = sorted({self.bucket_of[weight] for weight in weights}, key=self.forward_order.index)
        return lambda: self.wait(numbers)


def sum_of_squares(parts: Sequence[Tensor]) -> Tensor:
    """Returns the sum of the squares of all elements of the tensors, a scalar: float32, and float64 on a CPU."""
    # On a CPU, torch adds the squares up one by one. In fp32, the norm of a million elements is 1e-5 too small.
    dtype = torch.float64 if parts[0].device.type == "cpu" else torch.float32
    return torch.stack(torch._foreach_norm(parts, dtype=dtype)).square().sum()


def add_up(squares: Tensor, groups: Groups) -> None:
    """Adds up a scalar of each rank's partitions over all ranks, in place. Every rank gets the same bits.

    Ranks that hold copies of a partition must have the same bits, as each clips and updates its own copy. A sum over the
    ranks of a node could have another order on another node, so all ranks take part in one sum. The first copy counts, and
    the others add 0, or NaN if their scalar is not finite: all ranks then skip the step.
    """
    if groups.shards.copies > 1:
        squares.mul_(groups.shards.copy_rank == 0)
        dist.all_reduce(squares)
        return
    for group, size in (
        (groups.replica_group, groups.replica_size),
        (groups.tensor_group, groups.tensor_size),
    ):
        if size > 1:
            dist.all_reduce(squares, group=group)


def reduce_scatter(own: Tensor, whole: Tensor, group: dist.ProcessGroup) -> dist.Work:
    """Starts to sum `whole` [n] over the ranks. `own` [n / d] is the part of the sum that this rank gets.

    It may be the view of `whole` with this rank's part: NCCL reduces in place, and gloo works on a copy.
    """
    return dist.reduce_scatter_tensor(own, whole, group=group, async_op=True)


def all_reduce(own: Tensor, group: dist.ProcessGroup) -> dist.Work:
    """Starts to sum `own` over the ranks, in place."""
    return dist.all_reduce(own, group=group, async_op=True)


def all_gather(whole: Tensor, own: Tensor, group: dist.ProcessGroup) -> dist.Work:
    """Starts to fill `whole` [n] with `own` [n / d] of each rank, which may be a view of it."""
    return dist.all_gather_into_tensor(whole, own, group=group, async_op=True)


def call_before_parts(model: Decoder, make: Callable[[Iterable[nn.Parameter]], Callable[[], None]]) -> None:
    """Calls `make(weights)` for each part of the forward pass, and its result whenever the part begins.

    The parts are the embedding, each block, and `read_out`. `weights` are those that the part is the first to read. The
    calls run outside of compiled code: within it, they would break the graph of a block.
    """
    _call_before(model.embedding, make([*model.shared.parameters(), *model.embedding.parameters()]))
    for block in model.blocks:
        _call_before(block, make(block.parameters()))
    wait, read_out = make([*model.norm.parameters(), *model.head.parameters()]), model.read_out

    def waiting(*arguments: Any, **more: Any) -> Any:
        wait()
        return read_out(*arguments, **more)

    model.read_out = waiting  # type: ignore[method-assign]


def _call_before(module: nn.Module, call: Callable[[], None]) -> None:
    compiled = module._compiled_call_impl
    if compiled is None:
        module.register_forward_pre_hook(lambda *_: call())
        return

    def called(*arguments: Any, **more: Any) -> Any:
        call()
        return compiled(*arguments, **more)

    module._compiled_call_impl = called
