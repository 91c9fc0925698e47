"""Changes to the step of DeepSpeed 0.19's ZeRO stage 3 that save the host's time. `DeepSpeedEngine` applies them.

The numbers are those of a step of 1b_softmax on two H200s, in which the GPU waited for the host
(docs/log/2026-11-25-zero3-step.md).
"""

import math
from collections.abc import Iterable, Iterator
from itertools import accumulate, groupby
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ssscale.engine.exchange import add_up, sum_of_squares
from ssscale.parallel.groups import Groups
from ssscale.parallel.splits import split_dim

ALIGNED_BYTES = 256  # the distance of weights in memory is a multiple of it


def shorten_step(optimizer: Any, groups: Groups) -> None:
    """Makes the step of DeepSpeedZeroOptimizer_Stage3 call few kernels and wait for the GPU once.

    Weights, moments and the decision to skip a step are those of DeepSpeed's own step. The gradient norm adds the same
    squares in another order. Expects gradients and master weights in fp32 and nothing offloaded.
    """
    step = ShortStep(optimizer, groups)
    optimizer._partition_all_parameters = step.free_weights
    optimizer._get_norm_groups = step.norms
    optimizer._prepare_fp32_grad_for_sub_group = step.take_gradients
    optimizer.unscale_and_clip_grads = step.clip
    # DeepSpeed makes the partitions views of their flat buffer after each step. They are views from the start.
    optimizer._unflatten_partitioned_parameters = lambda sub_group: None
    optimizer._post_step = step.finish


class ShortStep:
    """Methods for `shorten_step`, in the order in which DeepSpeed's step calls them.

    A sub-group is some weights of a parameter group. This rank's partitions of them are one flat tensor, and so are their
    gradients: a slice of `grad_partitions_flat_buffer`.
    """

    def __init__(self, optimizer: Any, groups: Groups) -> None:
        self.optimizer, self.groups = optimizer, groups
        assert not optimizer.offload_optimizer, "gradients are not kept in the flat buffer"
        assert optimizer.grad_partitions_flat_buffer.dtype == torch.float32
        self.gradients = optimizer.grad_partitions_flat_buffer.split(optimizer.fp16_partitioned_groups_flat_numel)
        self.counted = list(self._counted())
        for flat, weights in zip(optimizer.fp16_partitioned_groups_flat, optimizer.fp16_groups, strict=True):
            assert_views(flat, [weight.ds_tensor for weight in weights])
        self.weights = list(optimizer.module.parameters())
        self.kept = [KeptWeights(weights) for weights in alike(optimizer.persistent_parameters)]
        self._finish = optimizer._post_step

    def _counted(self) -> Iterator[Tensor]:
        """Yields the gradients that count on this rank: of weights that all tensor-parallel ranks hold, the first's."""
        first = self.groups.tensor_rank == 0
        for weights, flat in zip(self.optimizer.fp16_groups, self.gradients, strict=True):
            start = 0
            for counts, run in groupby(weights, lambda weight: first or split_dim(weight) is not None):
                size = sum(weight.partition_numel() for weight in run)
                if counts:
                    yield flat.narrow(0, start, size)
                start += size

    def free_weights(self) -> None:
        """Frees the divided weights that backward has left whole.

        DeepSpeed visits all weights, and frees also those that it keeps whole between steps, to gather them again.
        """
        self.optimizer.parameter_offload.get_param_coordinator()._clean_inflight_param_registry()
        for weight in self.weights:
            weight.ds_active_sub_modules.clear()
            if not weight.ds_persist and weight.ds_status.name == "AVAILABLE":
                weight.partition()

    def norms(self) -> list[Tensor]:
        """Returns the norm of all gradients, a scalar on the CPU, in place of one norm per sub-group.

        The only time that the host waits for the GPU. DeepSpeed computes a norm per weight, after a copy to fp64, then
        sums over the ranks and waits for each sub-group: 34 ms. It decides about the step from what this returns, and
        scalars on the CPU cost nothing.
        """
        squares = sum_of_squares(self.counted or [self.gradients[0][:0]])
        add_up(squares, self.groups)
        return [squares.cpu().double().sqrt()]

    def take_gradients(self, sub_group: int) -> None:
        """Gives the optimizer the gradients where they are. DeepSpeed copies them to a new tensor."""
        self.optimizer.fp32_partitioned_groups_flat[sub_group].grad = self.gradients[sub_group]
        self.optimizer.averaged_gradients[sub_group] = None

    def clip(self, sub_group: int, norm: Tensor) -> None:
        """Scales gradients as DeepSpeed does, unless the factor is 1. norm: what `norms` returned."""
        limit = self.optimizer.clip_grad
        too_large = max(1.0, (float(norm) + 1e-6) / limit) if limit > 0 else 1.0
        if too_large > 1.0:
            self.gradients[sub_group].mul_(1.0 / too_large)

    def finish(self, timer_names: Any) -> None:
        """Updates the weights that are kept whole, in one all-gather. DeepSpeed has one per weight, and 16 ms."""
        for weights in self.kept:
            weights.gather()
        self._finish(timer_names)


class KeptWeights:
    """Weights with partitions of equal size that are kept whole. They become views of one buffer."""

    def __init__(self, weights: list[nn.Parameter]) -> None:
        first = weights[0]
        self.weights, self.group = weights, first.ds_process_group
        size, ranks = first.partition_numel(), dist.get_world_size(self.group)
        self.own = [weight.ds_tensor for weight in weights]
        self.received = first.ds_tensor.new_empty(ranks, len(weights), size)
        aligned = ALIGNED_BYTES // first.ds_tensor.element_size()
        buffer = first.ds_tensor.new_zeros(len(weights), math.ceil(ranks * size / aligned) * aligned)
        self.whole = buffer[:, : ranks * size].unflatten(1, (ranks, size))
        self.views = [row[: weight.ds_numel].view(weight.ds_shape) for row, weight in zip(buffer, weights, strict=True)]

    @torch.no_grad()
    def gather(self) -> None:
        """Updates the weights from the partitions of all ranks."""
        dist.all_gather_into_tensor(self.received.flatten(), torch.cat(self.own), group=self.group)
        self.whole.copy_(self.received.transpose(0, 1))
        for weight, view in zip(self.weights, self.views, strict=True):
            if weight.data_ptr() != view.data_ptr():  # DeepSpeed has gathered it
                weight.data = view
                weight.ds_status = type(weight.ds_status).AVAILABLE


def alike(weights: Iterable[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Sorts weights by the size of their partitions."""
    found: dict[int, list[nn.Parameter]] = {}
    for weight in weights:
        found.setdefault(weight.partition_numel(), []).append(weight)
    return list(found.values())


def assert_views(flat: Tensor, parts: list[Tensor]) -> None:
    """Asserts that the parts, one after another, are the memory of `flat`."""
    places = [flat.data_ptr() + flat.element_size() * end for end in accumulate(map(torch.numel, parts), initial=0)]
    assert [part.data_ptr() for part in parts] == places[:-1], "the partitions of a sub-group are not contiguous"
