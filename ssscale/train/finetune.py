"""Supervised fine-tuning on examples of prompt and answer."""

import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

from ssscale.config import to_yaml
from ssscale.config.schema import Config, ScheduleConfig, StageConfig
from ssscale.data.batch import IGNORE
from ssscale.data.questions import Example, make_batch
from ssscale.engine.deepspeed import DeepSpeedEngine
from ssscale.errors import SAVED, Stop, UserError
from ssscale.parallel.groups import Groups
from ssscale.train.build import build_model, choose_dtype, log_choices
from ssscale.train.checkpoint import CheckpointReader, TrainState, load_training_state, load_weights
from ssscale.train.claim import RunFolder
from ssscale.train.metrics import Metrics, Stopwatch
from ssscale.train.reading import reading
from ssscale.train.save import CheckpointWriter, Retention
from ssscale.train.schedule import learning_rate
from ssscale.train.signals import StopSignals
from ssscale.train.switch import load_switched

logger = logging.getLogger("ssscale")


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
    steps = int(epochs * num_examples / batch)
    if steps < 1:
        raise UserError(f"epochs={epochs:g} of {num_examples} examples do not make one batch of {batch}")
    schedule = ScheduleConfig(
        "cosine", lr, warmup_tokens=min(per_epoch, per_epoch * steps * batch // num_examples // 2)
    )
    stage = StageConfig("finetune", steps * batch * config.data.length, schedule)
    return replace(
        config,
        name=Path(run_dir).name,
        run_dir=run_dir,
        init_from=init_from,
        optimizer=replace(config.optimizer, betas=(0.9, 0.999), weight_decay=0.0, clip=1.0),
        train=replace(config.train, batch_size=batch, microbatch=microbatch, stages=[stage], max_steps=None),
        parallel=replace(config.parallel, ulysses=1, ring=1),  # rows are short
    )


def epoch_order(num_examples: int, seed: int, epoch: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
    return torch.randperm(num_examples, generator=generator).tolist()


class FineTuning:
    """A run: an optimizer step takes `batch_size` examples; its loss is the mean over examples of the sum over their
    answers' tokens. The newest checkpoint of the run's folder is gone on with, to the same bits.
    """

    def __init__(
        self,
        config: Config,
        groups: Groups,
        examples: Sequence[Example],
        files: dict[str, str],
        signals: StopSignals | None = None,
    ) -> None:
        """files: what a checkpoint keeps beside the weights, such as tokenizer.json. Raises UserError."""
        self.config, self.groups, self.examples, self.signals = config, groups, examples, signals
        self.files = files | {"config.yaml": to_yaml(config)}
        self.folder = Path(config.folder)
        self.place = RunFolder(self.folder, config, groups)
        with self.place.opening():
            self._open()

    def _open(self) -> None:
        config, groups, found = self.config, self.groups, self.place.choice.path
        reader = CheckpointReader(found) if found else None
        self.state = reader.state if reader else TrainState()
        self.place.take(config)
        self.writer = CheckpointWriter(self.folder / "checkpoints", groups, Retention(1), run=self.folder)
        dtype = choose_dtype(config.train.precision, groups.device)
        model = build_model(config, groups, dtype)
        log_choices(model, config, groups, dtype)
        if reader is not None:
            load_weights(reader, model, groups)
        else:
            assert config.init_from is not None
            with reading(Path(config.init_from), groups, "from", newest=True) as source:
                load_switched(CheckpointReader(source), model, config.model, groups)
        self.engine = DeepSpeedEngine(model, config, groups)
        if reader is not None:
            load_training_state(reader, self.engine, groups)
            logger.info("resumed from %s (step %d)", reader.path, self.state.step)
        self.num_steps = config.train.stages[0].tokens // config.tokens_per_step
        self._order: tuple[int, list[int]] = (-1, [])

    def run(self) -> None:
        """To the last step, saving at `train.save_every` and there. Raises Stop when a signal asks to stop."""
        train, watch = self.config.train, Stopwatch(self.state.tokens)
        try:
            with Metrics(self.folder, self.state.step, self.num_steps, self.groups.is_main) as metrics:
                while self.state.step < self.num_steps:
                    loss, lr, tokens = self._train_step()
                    step = self.state.step
                    last = step == self.num_steps
                    if last or step % train.log_every == 0:
                        record = {
                            "step": step,
                            "tokens": self.state.tokens,
                            "stage": "finetune",
                            "loss": loss,
                            "lr": lr,
                        }
                        rate = watch.lap(self.state.tokens)
                        metrics.write(record | {"answer_tokens": tokens, "tokens_per_second": rate})
                    metrics.advance(step)
                    stop = self._asked_to_stop()
                    if last or stop or (train.save_every and step % train.save_every == 0):
                        self._save()
                    if stop and not last:
                        raise Stop(f"step {step} is saved, the same command goes on", SAVED)
        finally:
            self.place.release()

    def _train_step(self) -> tuple[float, float, int]:
        """One step. Returns its loss, the learning rate and the answers' tokens, over all ranks."""
        train, groups = self.config.train, self.groups
        share = [self._example(n) for n in range(self.state.samples, self.state.samples + train.batch_size)]
        share = share[groups.data_rank :: groups.data_size]
        sums = torch.zeros(2, dtype=torch.float64, device=groups.device)
        for first in range(0, len(share), train.microbatch_rows):
            batch = make_batch(share[first : first + train.microbatch_rows], self.config.data.length)
            # The answers are a few tokens of a hundred: the vocabulary's logits of the others are not computed.
            rows = (batch.labels != IGNORE).nonzero().flatten().to(groups.device)
            batch = batch.to(groups.device)
            # Divided by the examples, not by the tokens: an example's losses are summed.
            losses = self.engine.forward_backward(batch.tokens, batch.layout, batch.labels, train.batch_size, rows)
            sums += torch.stack([losses.double().sum(), torch.tensor(float(batch.num_targets), device=groups.device)])
        tokens = self.state.tokens + self.config.tokens_per_step
        lr = learning_rate(train.stages, train.batch_size, tokens)
        result = self.engine.step(lr)
        dist.all_reduce(sums, group=groups.replica_group)
        self.state = replace(
            self.state,
            step=self.state.step + 1,
            applied_steps=self.state.applied_steps + (not result.skipped),
            tokens=tokens,
            samples=self.state.samples + train.batch_size,
        )
        return float(sums[0] / sums[1]), lr, int(sums[1])

    def _example(self, number: int) -> Example:
        """Example `number` of the run: each epoch has its own order."""
        epoch, index = divmod(number, len(self.examples))
        if self._order[0] != epoch:
            self._order = epoch, epoch_order(len(self.examples), self.config.train.seed, epoch)
        return self.examples[self._order[1][index]]

    def _asked_to_stop(self) -> bool:
        asked = torch.tensor(self.signals is not None and self.signals.received is not None, dtype=torch.int32)
        dist.all_reduce(asked)
        return bool(asked)

    def _save(self) -> None:
        self.writer.start(self.engine, self.state, self.files)
        if self.writer.wait() is None:
            raise UserError(f"step {self.state.step} could not be saved in {self.folder}: make room there")
