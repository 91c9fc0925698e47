"""Pretraining: a run over packed rows."""

import json
import logging
from collections.abc import Callable, Generator, Sequence

from ssscale.config.schema import Config
from ssscale.data.batch import Batch
from ssscale.data.stream import make_loader, make_order
from ssscale.parallel.groups import Groups
from ssscale.train.build import open_data
from ssscale.train.checkpoint import TrainState
from ssscale.train.hooks.base import Hook
from ssscale.train.hooks.standard import standard_hooks
from ssscale.train.hooks.tasks import Tasks
from ssscale.train.hooks.validation import Validation
from ssscale.train.run import Run
from ssscale.train.signals import StopSignals
from ssscale.train.stages import Part, Plan

logger = logging.getLogger("ssscale")


class PackedRows:
    """The rows of one data folder, in the order that the run reads them (`ssscale.train.run.Source`)."""

    def __init__(self, config: Config, plan: Plan, state: TrainState, trained_on: str | None, groups: Groups) -> None:
        """Raises UserError where the data is not what the checkpoint was trained on, unless `data.accept_changed` is set."""
        data = config.data
        self.plan, self.length, self.groups = plan, data.length, groups
        self.data = open_data(config, "train", fingerprint=None if data.accept_changed else trained_on)
        self.tokenizer = self.data.tokenizer_text  # now rather than at the first save
        self.names, self.fingerprint, self.vocab_size = self.data.names, self.data.fingerprint, self.data.vocab_size
        if trained_on not in (None, self.fingerprint):
            logger.warning("the data has changed since the checkpoint: going on at sample %d of it", state.samples)
        self.order = make_order(self.data, plan.mixes(data.path, state.skipped), data.shuffle_seed)

    def steps(self, config: Config, part: Part, state: TrainState) -> Generator[Sequence[Batch]]:
        data = config.data
        return make_loader(
            self.data,
            mixes=self.plan.mixes(data.path, state.skipped),
            seed=data.shuffle_seed,
            first_sample=self.plan.next_sample(state.step, state.skipped),
            num_samples=(min(part.last_step, self.plan.total_steps) - state.step) * part.batch_size,
            batch_size=part.batch_size,
            microbatch=config.train.microbatch_rows,
            rank=self.groups.data_rank,
            world_size=self.groups.data_size,
            num_workers=data.num_workers,
            prefetch=data.prefetch,
            timeout=data.timeout,
            one_document=data.one_document,
        )

    def divisor(self, num_targets: int) -> int:
        return num_targets

    def computed(self, state: TrainState) -> int:
        return state.tokens

    def counts(self, samples: int) -> dict[str, int]:
        pairs = zip(self.names, self.order.taken(samples), strict=True)
        return {f"tokens/{name}": number * self.length for name, number in pairs}

    def rows(self, samples: range) -> dict[str, list[int]]:
        found: dict[str, list[int]] = {}
        for sample in map(self.order.__getitem__, samples):
            found.setdefault(self.names[sample.source], []).append(sample.row)
        return found

    def files(self) -> dict[str, str]:
        tokenizer = self.data.manifest["tokenizer"]
        return {
            "tokenizer.json": self.tokenizer,
            "boundaries.json": json.dumps({key: tokenizer[key] for key in ("bos_id", "eos_id")}),
        }


def pretraining(
    config: Config,
    groups: Groups,
    signals: StopSignals | None = None,
    slurm_job: str | None = None,
    tasks: Callable[[Run], dict[str, float]] | None = None,
) -> Run:
    """A run of pretraining, ready for `ssscale.train.loop.train`. tasks: `ssscale.train.hooks.tasks`. Raises UserError."""

    def open_source(config: Config, plan: Plan, state: TrainState, trained_on: str | None) -> PackedRows:
        return PackedRows(config, plan, state, trained_on, groups)

    scores: list[Hook] = [Validation(config.train.eval_every)]
    if tasks is not None:
        scores.append(Tasks(config.train.task_every, tasks))
    hooks = standard_hooks(config.train, *scores)
    return Run(config, groups, open_source, hooks, signals=signals, slurm_job=slurm_job)
