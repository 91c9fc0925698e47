"""`train.log_every`: logs loss, learning rate, gradient norm, speed and the time of each phase."""

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from ssscale.train.hooks.base import Hook
from ssscale.train.metrics import speed, step_record

if TYPE_CHECKING:
    from ssscale.train.run import Run
    from ssscale.train.step import Done


class Records(Hook):
    def __init__(self, every: int) -> None:
        self.every = every

    def act(self, run: "Run", done: "Done") -> None:
        state, sums = run.state, done.sums.clone()  # later hooks read those of this rank
        dist.all_reduce(sums, group=run.groups.replica_group)
        record = step_record(run.config, state.step, state.tokens, sums, run.source.names, done.lr, done.grad_norm)
        if done.terms:
            terms = torch.stack(list(done.terms.values()))
            dist.all_reduce(terms, group=run.groups.replica_group)
            record |= zip([f"term/{name}" for name in done.terms], (terms / sums[1].sum()).tolist(), strict=True)
        record |= run.source.counts(state.samples)
        rate = run.watch.lap(run.source.computed(state))
        record |= speed(rate, run.config, run.groups, 0 if run.graphs is None else run.graphs.unseen)
        run.metrics.write(record | run.phases.lap(state.step))
        run.events.write(b"")  # retries events that could not be written to a full disk
