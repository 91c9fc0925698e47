"""Supervised fine-tuning on examples of prompt and answer."""

from collections.abc import Generator, Mapping, Sequence
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import torch

from ssscale.config.registry import MIXERS
from ssscale.config.schema import Config, ScheduleConfig, StageConfig, optimizer_config
from ssscale.data.batch import Batch
from ssscale.data.questions import Example, make_batch
from ssscale.errors import UserError
from ssscale.parallel.groups import Groups
from ssscale.train.checkpoint import TrainState
from ssscale.train.hooks.standard import standard_hooks
from ssscale.train.run import Run
from ssscale.train.signals import StopSignals
from ssscale.train.stages import Part, Plan


def finetuning_config(
    config: Config,
    init_from: str,
    run_dir: str,
    *,
    num_examples: int,
    epochs: float,
    lr: float,
    batch: int,
    microbatch: int,
) -> Config:
    """arXiv:2501.19399, Table 3: AdamW (0.9, 0.999) without decay, clip 1, cosine after one epoch of warmup.

    As in pretraining a stage counts `data.length` tokens a row, whatever an example has.
    """
    per_epoch = num_examples * config.data.length
    if not epochs * num_examples < 2**31:
        raise UserError(f"epochs={epochs:g} of {num_examples} examples are 2^31 examples or more")
    steps = int(epochs * num_examples / batch)
    if steps < 1:
        raise UserError(f"epochs={epochs:g} of {num_examples} examples do not make one batch of {batch}")
    schedule = ScheduleConfig(
        "cosine", lr, warmup_tokens=min(per_epoch, per_epoch * steps * batch // num_examples // 2)
    )
    stage = StageConfig("finetune", steps * batch * config.data.length, schedule)
    others = {name: kind() for name, kind in MIXERS.items() if name not in config.model.mixers}  # of other stages
    return replace(
        config,
        model=replace(config.model, mixer=replace(config.model.mixer, **others)),
        name=Path(run_dir).name,
        run_dir=run_dir,
        init_from=init_from,
        optimizer=replace(
            optimizer_config("adamw", betas=(0.9, 0.999)),
            weight_decay=0.0,
            vector_lr_multiplier=config.optimizer.vector_lr_multiplier,
        ),
        train=replace(config.train, batch_size=batch, microbatch=microbatch, stages=[stage], max_steps=None),
        parallel=replace(config.parallel, ulysses=1, ring=1),  # rows are short
    )


def epoch_order(num_examples: int, seed: int, epoch: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
    return torch.randperm(num_examples, generator=generator).tolist()


class Examples:
    """Examples in an order of their own for each epoch (`ssscale.train.run.Source`).

    The loss is the mean over examples of the sum over their answers' tokens.
    """

    def __init__(
        self,
        examples: Sequence[Example],
        kept: Mapping[str, str],
        groups: Groups,
        config: Config,
        plan: Plan,
        state: TrainState,
        trained_on: str | None,
    ) -> None:
        """kept: what a checkpoint keeps beside the weights, such as tokenizer.json. Raises UserError for other examples
        than the checkpoint was trained on, unless `data.accept_changed` is set.
        """
        self.examples, self.kept, self.groups, self.plan = examples, kept, groups, plan
        self.names, self.vocab_size = ("answers",), None
        self.seed, self.batch_size = config.train.seed, config.train.batch_size
        self.fingerprint = sha256(repr([tuple(example) for example in examples]).encode()).hexdigest()
        if trained_on not in (None, self.fingerprint) and not config.data.accept_changed:
            raise UserError(
                f"questions= are not those that the checkpoint in {config.folder} was trained on: give the same files, or "
                "another run_dir (data.accept_changed=true continues with them)"
            )
        self._order: tuple[int, list[int]] = (-1, [])
        self._samples = self._tokens = 0  # of `computed`

    def steps(self, config: Config, part: Part, state: TrainState) -> Generator[list[Batch]]:
        groups, rows = self.groups, config.train.microbatch_rows
        for step in range(state.step, min(part.last_step, self.plan.total_steps)):
            first = self.plan.next_sample(step, state.skipped)
            share = [self._example(n) for n in range(first, first + part.batch_size)]
            share = share[groups.data_rank :: groups.data_size]
            yield [make_batch(share[n : n + rows], config.data.length) for n in range(0, len(share), rows)]

    def divisor(self, num_targets: int) -> int:
        return self.batch_size

    def computed(self, state: TrainState) -> int:
        # `state.tokens` counts whole rows, and an example fills only a part of one. The range is empty after a rollback.
        self._tokens += sum(len(self._example(sample).tokens) for sample in range(self._samples, state.samples))
        self._samples = state.samples
        return self._tokens

    def counts(self, samples: int) -> dict[str, int]:
        return {"examples": samples}

    def rows(self, samples: range) -> dict[str, list[int]]:
        return {"examples": [self._number(sample) for sample in samples]}

    def files(self) -> Mapping[str, str]:
        return self.kept

    def _example(self, sample: int) -> Example:
        return self.examples[self._number(sample)]

    def _number(self, sample: int) -> int:
        epoch, index = divmod(sample, len(self.examples))
        if self._order[0] != epoch:
            self._order = epoch, epoch_order(len(self.examples), self.seed, epoch)
        return self._order[1][index]


def finetuning(
    config: Config,
    groups: Groups,
    examples: Sequence[Example],
    files: Mapping[str, str],
    signals: StopSignals | None = None,
    slurm_job: str | None = None,
) -> Run:
    """A run of fine-tuning, ready for `ssscale.train.loop.train`. files: `Examples`. Raises UserError."""

    def open_source(config: Config, plan: Plan, state: TrainState, trained_on: str | None) -> Examples:
        return Examples(examples, files, groups, config, plan, state, trained_on)

    return Run(
        config,
        groups,
        open_source,
        standard_hooks(config.train),
        signals=signals,
        slurm_job=slurm_job,
        init_key="from",
    )
