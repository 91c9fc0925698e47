"""`train.eval_every`: the validation loss of a run."""

import logging
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn

from ssscale.config.schema import Config
from ssscale.data.batch import sums_by_position, sums_by_source, take_share
from ssscale.data.stream import PackedData, valid_batches
from ssscale.parallel.groups import Groups
from ssscale.train.build import open_data
from ssscale.train.hooks.base import Hook
from ssscale.train.metrics import losses_by_position, losses_by_source, mean_loss

if TYPE_CHECKING:
    from ssscale.train.run import Run
    from ssscale.train.step import Done

logger = logging.getLogger("ssscale")


class Validation(Hook):
    """Logs losses on the validation split of the current training data. Checkpoints keep the mean loss."""

    def __init__(self, every: int) -> None:
        self.every = every
        self.said: set[str] = set()  # fingerprints of data whose split is known to have too few rows

    def act(self, run: "Run", done: "Done") -> None:
        with run.watch.paused():
            run.mark("evaluation")
            valid = open_data(run.config, "valid", fingerprint=run.source.fingerprint)
            self.say_rows(valid, run.config.train.eval_rows)
            losses = validation_losses(run.engine.module, valid, run.config, run.groups)
            run.state = replace(run.state, valid_loss=losses["valid_loss"])
            run.metrics.write({"step": run.state.step, "tokens": run.state.tokens, **losses})

    def say_rows(self, valid: PackedData, asked: int) -> None:
        """Says once per data folder that the split has fewer rows than `train.eval_rows`."""
        rows = sum(valid.sources.values())
        if rows < asked and valid.fingerprint not in self.said:
            self.said.add(valid.fingerprint)
            logger.info(
                "train.eval_rows=%d: the validation split has %d rows; each loss is over all of them", asked, rows
            )


@torch.no_grad()
def validation_losses(model: nn.Module, data: PackedData, config: Config, groups: Groups) -> dict[str, float]:
    """Returns mean losses in nats per token over `train.eval_rows` rows: overall, by source and by position.

    data: the validation split. All ranks call it together, and the result is equal on all of them.
    """
    length = config.data.length
    sums = torch.zeros(2, len(data.names), dtype=torch.float64, device=groups.device)
    positions = torch.zeros(2, (length - 1).bit_length() + 1, dtype=torch.float64, device=groups.device)
    model.eval()
    batches = valid_batches(
        data,
        rows=config.train.eval_rows,
        microbatch=config.train.microbatch_rows,
        rank=groups.data_rank,
        world_size=groups.data_size,
        one_document=config.data.one_document,
    )
    for batch in batches:
        batch = take_share(batch, groups).to(groups.device)
        losses = model(batch.tokens, batch.layout, batch.labels)
        sums += sums_by_source(losses, batch, len(data.names))
        positions += sums_by_position(losses, batch, length)
    model.train()
    for total in (sums, positions):
        dist.all_reduce(total, group=groups.replica_group)
    return {
        "valid_loss": mean_loss(sums),
        **losses_by_source(sums, data.names, "valid_loss"),
        **losses_by_position(positions, "valid_position"),
    }
