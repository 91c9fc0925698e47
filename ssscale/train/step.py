"""One training step: what the ranks exchange before it, its microbatches, and the step of the optimizer."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from ssscale.data.batch import Batch, sums_by_source, take_share
from ssscale.train.schedule import learning_rate

if TYPE_CHECKING:
    from ssscale.train.run import Run


@dataclass(frozen=True)
class Agreed:
    """What all ranks know before a step. It is equal on all of them."""

    num_targets: int  # tokens with a target in the coming step, over all ranks
    stop: bool  # whether any rank was asked to stop
    written: bool  # whether, on every rank, the writing of a checkpoint has ended, successfully or not
    failed: bool  # whether any rank has failed to write its files of the checkpoint
    last_loss: float  # tensor_size · Σ losses of the step before, in nats: tensor-parallel ranks add the same losses


@dataclass(frozen=True)
class Done:
    """The result of a step on this rank."""

    batches: Sequence[Batch]
    num_targets: int  # over all ranks
    lr: float
    sums: Tensor  # `sums_by_source` of this rank
    terms: dict[str, Tensor]  # each of `Decoder.terms`, summed over this rank's tokens, float64
    loss: float  # Σ losses of this rank's tokens, in nats
    grad_norm: float | None
    skipped: bool  # whether the weights did not change because gradients had NaN or Inf


def agree(run: "Run", batches: Sequence[Batch]) -> Agreed:
    """Exchanges what ranks must know before a step, with one sum over all ranks. Does not change the run."""
    asked = run.signals is not None and run.signals.received is not None
    targets = sum(batch.num_targets for batch in batches)
    writer, loss = run.saving.writer, 0.0 if run.last is None else run.last.loss
    sums = torch.tensor([targets, asked, writer.done, writer.failed, loss], dtype=torch.float64)
    dist.all_reduce(sums)
    num_targets, stop, written, failed, loss = sums.tolist()
    groups = run.groups
    # The ranks of a tensor-parallel and a context-parallel group have read the same rows, so the sum over all ranks
    # counts each target tensor_size · context_size times. A context rank has the losses of its own share of the tokens
    # only, so each loss is counted tensor_size times.
    return Agreed(
        num_targets=max(int(num_targets) // (groups.tensor_size * groups.context_size), 1),
        stop=stop > 0,
        written=written == groups.world_size,
        failed=failed > 0,
        last_loss=loss,
    )


def train_step(run: "Run", batches: Sequence[Batch], num_targets: int) -> Done:
    """Runs forward and backward of this rank's microbatches, then one step of the optimizer.

    num_targets: tokens with a target over all ranks.
    """
    groups, train = run.groups, run.config.train
    sums = torch.zeros(2, len(run.source.names), dtype=torch.float64, device=groups.device)
    terms = {name: torch.zeros((), dtype=torch.float64, device=groups.device) for name in run.engine.module.terms}
    divisor = run.source.divisor(num_targets)
    for batch in batches:
        batch = take_share(batch, groups).to(groups.device, non_blocking=True)  # the loader has page-locked it
        passed = run.engine.forward_backward(batch.tokens, batch.layout, batch.labels, divisor, batch.rows)
        sums += sums_by_source(passed.losses, batch, len(run.source.names))
        terms = {name: total + passed.terms[name] for name, total in terms.items()}
    lr = learning_rate(train.stages, run.given.train.batch_size, run.state.tokens + run.part.tokens_per_step)
    result = run.engine.step(lr)
    # float() waits until the GPU has computed the sum. This costs no time: engine.step has already waited for its check
    # of the gradients, which are computed after the losses.
    return Done(batches, num_targets, lr, sums, terms, float(sums[0].sum()), result.grad_norm, result.skipped)
