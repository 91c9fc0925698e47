"""One training step: the ranks agree on what all of them must know, run their microbatches, and update the weights."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from ssscale.data.batch import Batch, sums_by_source, take_share
from ssscale.errors import UserError
from ssscale.train.schedule import learning_rate

if TYPE_CHECKING:
    from ssscale.train.run import Run, Source


@dataclass(frozen=True)
class Agreed:
    """What the ranks agree on before a step. All ranks hold the same values."""

    # Tokens with a target in the coming step, in the batches of all ranks together. At least 1.
    num_targets: int
    # Whether any rank was asked to stop.
    stop: bool
    # Whether any rank could not read its batches.
    unread: bool
    # Whether every rank has ended its attempt to write its part of the current checkpoint. An attempt may have failed.
    written: bool
    # Whether any rank has failed to write its part.
    failed: bool
    # Sum over all ranks of the losses of the previous step, in nats. All ranks of a tensor-parallel group compute the same
    # losses, so the sum counts each token's loss tensor_size times.
    last_loss: float


@dataclass(frozen=True)
class Done:
    """The result of a step on this rank."""

    batches: Sequence[Batch]
    source: "Source"  # of the batches; the next stage may read another one
    num_targets: int  # over all ranks
    lr: float
    # Losses and numbers of targets by source, of this rank (`sums_by_source`): [2, number of sources] float64, on the CPU.
    sums: Tensor
    # By name (`Decoder.terms`): terms that are added to the cross entropy, such as the z-loss, and terms that are only
    # logged. Each is a sum over this rank's tokens, a float64 scalar on the CPU.
    terms: dict[str, Tensor]
    loss: float  # Σ losses of this rank's tokens, in nats
    grad_norm: float | None
    skipped: bool  # whether the weights did not change because gradients had NaN or Inf


def agree(run: "Run", batches: Sequence[Batch] | UserError) -> Agreed:
    """Returns what all ranks must know before a step, from one all-reduce. Does not change the run.

    batches: of this rank, or the error of reading them.
    """
    asked = run.signals is not None and run.signals.received is not None
    unread = isinstance(batches, UserError)
    targets = 0 if isinstance(batches, UserError) else sum(batch.num_targets for batch in batches)
    writer, loss = run.saving.writer, 0.0 if run.last is None else run.last.loss
    sums = torch.tensor([targets, asked, unread, writer.done, writer.failed, loss], dtype=torch.float64)
    if dist.get_world_size() > 1:
        dist.all_reduce(sums)
    num_targets, stop, any_unread, written, failed, loss = sums.tolist()
    groups = run.groups
    # The all-reduce counts some values several times. All ranks of a tensor-parallel or context-parallel group have read
    # the same rows, so each target is counted tensor_size · context_size times. Each loss is counted only
    # tensor_size times, because a context-parallel rank computes the losses of its own share of the tokens, not of the
    # whole rows. Only num_targets is corrected here.
    return Agreed(
        num_targets=max(int(num_targets) // (groups.tensor_size * groups.context_size), 1),
        stop=stop > 0,
        unread=any_unread > 0,
        written=written == groups.world_size,
        failed=failed > 0,
        last_loss=loss,
    )


def train_step(run: "Run", batches: Sequence[Batch], num_targets: int, prepare: Callable[[], None]) -> Done:
    """Runs forward and backward of this rank's microbatches, then one step of the optimizer.

    batches: the microbatches. num_targets: tokens with a target in the batches of all ranks together. prepare: reads the
    batches of the next step; it is called once, while a GPU is still computing.
    """
    groups, train = run.groups, run.config.train
    sums = torch.zeros(2, len(run.source.names), dtype=torch.float64, device=groups.device)
    terms = {name: torch.zeros((), dtype=torch.float64, device=groups.device) for name in run.engine.terms}
    divisor = run.source.divisor(num_targets)
    for batch in batches:
        batch = take_share(batch, groups).to(groups.device, non_blocking=True)  # the loader returns pinned memory
        passed = run.engine.forward_backward(batch.tokens, batch.layout, batch.labels, divisor, batch.rows)
        sums += sums_by_source(passed.losses, batch, len(run.source.names))
        terms = {name: total + passed.terms[name] for name, total in terms.items()}
    readback = torch.cat([sums.flatten(), *(term.view(1) for term in terms.values())])
    lr = learning_rate(train.stages, run.given.train.batch_size, run.state.tokens + run.part.tokens_per_step)
    run.mark("data")
    prepare()  # before the update, for whose norm the host waits
    result = run.engine.step(lr, readback)
    run.mark("hooks")
    sums, last = result.readback[: sums.numel()].view(sums.shape), result.readback[sums.numel() :]
    terms = dict(zip(terms, last, strict=True))
    loss = float(sums[0].sum())
    return Done(batches, run.source, num_targets, lr, sums, terms, loss, result.grad_norm, result.skipped)
