"""The update of DeepSpeed's BF16_Optimizer by `ssscale_kernels.adamw`: AdamW in bf16 under ZeRO stage 1 (`in_one_pass`).

DeepSpeed creates the buffers, divides them over the ranks, reduces gradients and gathers weights. This file replaces what it
does between: it keeps gradients until the step, computes their norm, and updates this rank's partition. The state stays
where DeepSpeed and torch keep it (`fp32_groups_flat_partition`, `optimizer.state`), so checkpoints do not change.
"""

import math
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from ssscale_kernels.adamw import FlatAdamW, Segment, Settings, clip_factor
from torch import Tensor

from ssscale.engine.exchange import Exchange, add_up
from ssscale.engine.host_copy import HostCopy
from ssscale.optim.base import Optimizer
from ssscale.parallel.groups import Groups
from ssscale.parallel.splits import split_dim


@dataclass(frozen=True)
class Piece:
    """The part of a weight that lies in this rank's partition of its group.

    Elements [start, start + size) of the flattened weight are elements [offset, offset + size) of the partition.
    """

    group: int
    index: int  # of the weight in its group
    start: int
    offset: int
    size: int


class OnePassUpdate:
    """Norm, then clipping, AdamW and the bf16 copy in one pass. `replace_update` gives its methods to a BF16_Optimizer.

    direct: whether gradients stay in bf16, and the memory of the fp32 sums is released. This is so if a step has one
        microbatch, unless an `exchange` sends fp32. Without one, or if it pushes them (`ssscale.engine.direct`), they stay
        where autograd has put them. Results have the same bits: the sum of one bf16 gradient is that gradient, and DeepSpeed
        reduces in bf16.
    """

    def __init__(
        self, optimizer: Any, kind: Optimizer, groups: Groups, clip: float, exchange: Exchange | None = None
    ) -> None:
        """optimizer: DeepSpeed's BF16_Optimizer, before its first step. clip: `optimizer.clip`.

        exchange: reduces flat buffers of gradients and gathers the weights; None: DeepSpeed does.
        """
        self.exchange = exchange
        self.optimizer, self.kind, self.groups, self.clip = optimizer, kind, groups, clip
        self.direct = False
        self.pieces = [
            Piece(i, j, mapping.lp_fragment_address.start, address.start, address.numel)
            for i, weights in enumerate(optimizer.bf16_groups)
            for j, weight in enumerate(weights)
            if (mapping := weight._hp_mapping) is not None
            for address in [mapping.get_hp_fragment_address()]
        ]
        counts = [sum(piece.group == i for piece in self.pieces) for i in range(len(optimizer.bf16_groups))]
        ends = list(accumulate(counts))
        self._runs = [range(end - count, end) for end, count in zip(ends, counts, strict=True)]  # of pieces, by group
        self._taken: dict[tuple[int, int], Tensor] = {}  # the gradients of this step, if direct without an exchange
        self._adamw: FlatAdamW | None = None  # created at the first step, as torch's states are
        self._steps: list[int] = []  # updates so far, by group
        self.readback = torch.empty(0)  # what the host reads together with the norm: [n] on the device of the model
        # Of the norm of the last step's gradients, and of `readback`.
        self._copies = HostCopy(torch.zeros(())), HostCopy(self.readback)

    def set_accumulation(self, microbatches: int) -> None:
        """Sets the number of microbatches per step. Called between steps."""
        self.direct = microbatches == 1 and (self.exchange is None or self.exchange.can_be_direct())
        flats = self.optimizer.fp32_groups_gradients_flat
        for total in flats if self.direct else ():
            total.untyped_storage().resize_(0)
        if self.exchange is not None and self.exchange.direct != self.direct:
            self.exchange.set_direct(self.direct, self.optimizer.fp32_groups_gradients)
        for total in flats if not self.direct else ():
            storage, needed = total.untyped_storage(), total.numel() * total.element_size()
            if storage.nbytes() < needed:
                storage.resize_(needed)
                total.zero_()  # the padding is reduced too

    def states_changed(self) -> None:
        """Called after tensors of `optimizer.state` were replaced."""
        self._adamw = None

    @torch.no_grad()
    def take(self, weight: Tensor, group: int, index: int, clear_lp_grads: bool) -> None:
        """Keeps or adds a weight's gradient as soon as backward has computed it. The caller drops `weight.grad` then.

        The first gradient of a step is written to the fp32 sum and not added to it, so sums need not be zeroed.
        """
        if weight.grad is None:
            return
        seen = self.optimizer.fp32_groups_has_gradients[group]
        total = self.optimizer.fp32_groups_gradients[group][index]
        gradient = weight.grad.view(total.shape)
        if self.direct:
            assert not seen[index], "a weight got two gradients in a step with one microbatch"
            if self.exchange is None:
                self._taken[group, index] = gradient
            else:
                self.exchange.keep(group, index, gradient)
        elif seen[index]:
            total.add_(gradient)
        else:
            total.copy_(gradient)
        seen[index] = True

    @torch.no_grad()
    def zero_missing(self) -> None:
        """Sets the missing gradients, those of weights that got none, to 0. Called after the last backward pass of a step."""
        optimizer = self.optimizer
        for i, seen in enumerate(optimizer.fp32_groups_has_gradients):
            for j in (j for j, found in enumerate(seen) if not found):
                zeros = torch.zeros_like(optimizer.bf16_groups[i][j]).view(-1) if self.direct else None
                if zeros is not None and self.exchange is not None:
                    self.exchange.keep(i, j, zeros)
                elif zeros is not None:
                    self._taken[i, j] = zeros
                else:
                    optimizer.fp32_groups_gradients[i][j].zero_()

    def to_reduce(self) -> tuple[list[Tensor], dict[str, list[Tensor]]]:
        """Returns the gradients that DeepSpeed reduces over the replicas in place, and an empty group of experts.

        A single replica reduces nothing, and its fp32 sums stay as they are. DeepSpeed's own step rounds them to bf16.
        """
        self.zero_missing()
        if self.groups.replica_size == 1:
            return [], {}
        taken = [self._taken[key] for key in sorted(self._taken)]
        return taken if self.direct else self.optimizer.non_expert_gradients, {}

    @torch.no_grad()
    def step(self) -> None:
        """Updates this rank's partition from reduced gradients, and gathers the bf16 weights.

        The host does not wait for the GPU. `read` waits for the norm, while the GPU updates. If the norm is not finite, the
        kernel changes nothing.
        """
        adamw, optimizer = self._adamw or self._open(), self.optimizer
        gradients, parts = self._gradients(), 1 if self.exchange is None else self.exchange.parts
        total = adamw.sum_of_squares(gradients, parts)
        add_up(total, self.groups)
        norm, factor = clip_factor(total, self.clip)
        self._copies = HostCopy(norm), HostCopy(self.readback)
        self._update_and_gather(adamw, gradients, factor, parts)
        counters = [optimizer.state[flat]["step"] for flat in optimizer.fp32_groups_flat_partition]
        # A list of terms: a single one would be read by the host, as the number that this function also takes.
        torch._foreach_add_(counters, [norm.isfinite().to(counters[0].dtype)] * len(counters))

    def read(self) -> tuple[float, Tensor]:
        """Waits until the norm of the last step is known. Returns it and `readback`, on the CPU.

        The norm is infinite if the step changed nothing.
        """
        norm, readback = (copy.read() for copy in self._copies)
        if not math.isfinite(norm):
            return math.inf, readback
        self._steps = [steps + 1 for steps in self._steps]
        return float(norm), readback

    def clear(self, set_to_none: bool = True) -> None:
        """Forgets the gradients of the step."""
        self._taken.clear()
        if self.exchange is not None:
            self.exchange.let_go()
        self.optimizer.clear_lp_grads(set_to_none=True)
        seen = self.optimizer.fp32_groups_has_gradients
        seen[:] = [[False] * len(group) for group in seen]

    def _open(self) -> FlatAdamW:
        optimizer = self.optimizer
        for flat in optimizer.fp32_groups_flat_partition:
            if not optimizer.state.get(flat):
                optimizer.state[flat] = self.kind.state_after(flat, 0)
        self._steps = [int(optimizer.state[flat]["step"]) for flat in optimizer.fp32_groups_flat_partition]
        self._adamw = FlatAdamW([self._segment(piece) for piece in self.pieces])
        return self._adamw

    def _segment(self, piece: Piece) -> Segment:
        flat = self.optimizer.fp32_groups_flat_partition[piece.group]
        weight, state = self.optimizer.bf16_groups[piece.group][piece.index], self.optimizer.state[flat]
        here = slice(piece.offset, piece.offset + piece.size)
        return Segment(
            master=flat.detach()[here],
            exp_avg=state["exp_avg"][here],
            exp_avg_sq=state["exp_avg_sq"][here],
            rounded=weight.detach().view(-1)[piece.start : piece.start + piece.size],
            group=piece.group,
            counted=split_dim(weight) is not None or self.groups.tensor_rank == 0,
        )

    def _gradients(self) -> list[Tensor]:
        """Returns the reduced gradients of the pieces, or `Exchange.parts` tensors for each, whose sum they are."""
        if self.exchange is not None:
            parts = (self.exchange.own_parts(p.group, p.index, p.offset, p.size) for p in self.pieces)
            return [part for found in parts for part in found]
        whole = self.optimizer.fp32_groups_gradients
        return [
            (self._taken[p.group, p.index] if self.direct else whole[p.group][p.index]).narrow(0, p.start, p.size)
            for p in self.pieces
        ]

    def _settings(self) -> list[Settings]:
        settings = []
        for group, steps in zip(self.optimizer.param_groups, self._steps, strict=True):
            beta1, beta2 = group["betas"]
            settings.append(Settings(group["lr"], beta1, beta2, group["eps"], group["weight_decay"], steps + 1))
        return settings

    def _update_and_gather(self, adamw: FlatAdamW, gradients: list[Tensor], factor: Tensor, parts: int) -> None:
        """Starts to gather what the forward pass reads first while the rest is still updated."""
        settings, exchange = self._settings(), self.exchange
        if exchange is None:
            adamw.update(gradients, settings, factor, parts)
            self._gather()
            return
        runs = [self._runs[bucket] for bucket in exchange.forward_order]
        updates = adamw.update_in_turn(gradients, settings, factor, parts, runs)
        for bucket, _ in zip(exchange.forward_order, updates, strict=True):
            exchange.gather_bucket(bucket)

    def _gather(self) -> None:
        from deepspeed.runtime.utils import all_gather_dp_groups

        optimizer = self.optimizer
        all_gather_dp_groups(
            groups_flat=optimizer.bf16_groups_flat,
            partitioned_param_groups=optimizer.bf16_partitioned_groups,
            dp_process_group=optimizer.real_dp_process_group,
            start_alignment_factor=optimizer.nccl_start_alignment_factor,
            allgather_bucket_size=optimizer.allgather_bucket_size,
        )
