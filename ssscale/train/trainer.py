"""The training loop: batches → engine → metrics and checkpoints."""

import gc
import json
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from ssscale.config import to_yaml
from ssscale.config.schema import Compile, Config
from ssscale.data.batch import Batch, take_share
from ssscale.data.stream import make_loader, make_order
from ssscale.engine.deepspeed import DeepSpeedEngine
from ssscale.errors import DIVERGED, SAVED, Stop, UserError
from ssscale.model.decoder import VOCAB_WEIGHTS
from ssscale.model.init import initialize_weights
from ssscale.parallel.groups import Groups
from ssscale.train.build import build_model, choose_compile, choose_dtype, log_choices, open_data
from ssscale.train.checkpoint import CheckpointReader, TrainState, check_shapes, load_training_state, load_weights
from ssscale.train.checkpoint_folder import checkpoint_path
from ssscale.train.claim import RunFolder
from ssscale.train.faults import Rollback, SpikeDetector, open_events, write_event
from ssscale.train.guard import check_copies, listed, without_gradient
from ssscale.train.metrics import Metrics, Stopwatch, speed, step_record, sums_by_source
from ssscale.train.microbatch import StageConfigs
from ssscale.train.observe import StepParts, observe, profiled
from ssscale.train.peers import Peers, Where
from ssscale.train.reading import reading
from ssscale.train.run_folder import read_rollback, write_rollback
from ssscale.train.save import CheckpointWriter, Retention, Saved
from ssscale.train.schedule import learning_rate
from ssscale.train.signals import StopSignals
from ssscale.train.stages import Part, Plan
from ssscale.train.switch import load_switched
from ssscale.train.validation import validation_losses
from ssscale.train.watchdog import Watchdog

logger = logging.getLogger("ssscale")

MAX_ROLLBACKS = 3  # to one checkpoint


class Trainer:
    """A run: built from its configuration, resumed from its newest checkpoint, trained to its last stage's end.

    tasks: evaluates `train.tasks` on the weights as they are and returns metrics; it changes nothing of the run.
    """

    def __init__(
        self,
        config: Config,
        groups: Groups,
        signals: StopSignals | None = None,
        slurm_job: str | None = None,
        tasks: "Callable[[Trainer], dict[str, float]] | None" = None,
    ) -> None:
        self.started = time.perf_counter()
        self.run_config, self.groups, self.signals, self.tasks = config, groups, signals, tasks
        self.folder, self.plan = Path(config.folder), Plan(config)
        self.peers = Peers(self.folder, groups)
        self.place = RunFolder(self.folder, config, groups, slurm_job)
        with self.peers.telling(lambda: Where(config, 0, "start", 0)), self.place.opening():
            self._open(config)

    def _open(self, config: Config) -> None:
        found = self.place.choice.path
        self.reader = CheckpointReader(found) if found else None
        self.state = read_rollback(self.folder, self.reader.state) if self.reader else TrainState()
        self.saved_step, self.spikes = self.state.step, SpikeDetector(config.train.spike_z)
        self.skipped_in_a_row = self.held = 0
        self.configs = StageConfigs(self.plan, self.groups)
        self.events = open_events(self.folder)
        self.part = self.plan.at(self.state.step)
        self.config = self.configs.of(self.part)  # of the stage that is trained
        last = self.plan.configs[self.plan.at(max(self.state.step - 1, 0)).stage].data.path
        self._open_data(self.state.data_fingerprint or None if last == self.config.data.path else None)
        self.place.take(config)
        self.peers.open()
        retention = Retention(config.train.keep, config.train.keep_every, config.train.keep_best)
        self.writer = CheckpointWriter(self.folder / "checkpoints", self.groups, retention, run=self.folder)
        self._build()

    def _open_data(self, trained_on: str | None) -> None:
        """The stage's data. trained_on: the fingerprint that the checkpoint gives it."""
        data = self.config.data
        self.data = open_data(self.config, "train", fingerprint=None if data.accept_changed else trained_on)
        self.tokenizer = self.data.tokenizer_text  # now rather than at the first save
        if trained_on not in (None, self.data.fingerprint):
            logger.warning("the data has changed since the checkpoint: going on at sample %d of it", self.state.samples)
        self.order = make_order(self.data, self.plan.mixes(data.path, self.state.skipped), data.shuffle_seed)

    def _build(self) -> None:
        config, groups = self.config, self.groups
        torch.manual_seed(config.train.seed)
        dtype = choose_dtype(config.train.precision, groups.device)
        model = build_model(config, groups, dtype)
        log_choices(model, config, groups, dtype, self.data.vocab_size)
        if self.reader is None:
            initialize_weights(model, config.model, groups, config.train.seed)
            if config.init_from is not None:
                with reading(Path(config.init_from), groups, "init_from", newest=True) as source:
                    load_switched(CheckpointReader(source), model, config.model, groups)
                logger.info("weights from %s, a new optimizer", source)
        else:
            check_shapes(self.reader, model, groups, VOCAB_WEIGHTS)
            load_weights(self.reader, model, groups)
        compiled = choose_compile(config, groups.device)
        if compiled == Compile.model:
            model.compile()
        elif compiled == Compile.block:
            model.compile_parts()
        self.engine = DeepSpeedEngine(model, config, groups)
        self.engine.mark = self._mark
        self.last_loss, self.last_targets = 0.0, 0
        if self.reader is not None:
            load_training_state(self.reader, self.engine, groups)
            logger.info("resumed from %s (step %d)", self.reader.path, self.state.step)
        if config.train.save_every:
            self.writer.prepare(self.engine)
        self.reader = None

    def run(self) -> None:
        """Train to the end, saving, evaluating and logging at their intervals. Returns at once for a finished run.

        Raises Stop where the run ends before its last step.
        """
        self.watchdog = Watchdog(self.folder, self.groups.rank, self.groups.world_size, self.run_config.train.watchdog)
        with self.peers.telling(lambda: Where(self.config, self.state.step + 1, self.watchdog.phase, self.held)):
            self._train()

    def _train(self) -> None:
        try:
            if self.plan.total_steps == 0 and self.place.choice.path is None:
                self._start_save()  # the weights that the run begins with are what was asked for
                if self.writer.wait() is None:
                    raise UserError(f"the weights could not be saved in {self.folder}: make room there")
            while self.state.step < self.plan.total_steps:
                try:
                    self._run()
                except Rollback:
                    self._roll_back()
            logger.info("%s is finished: step %d of %d", self.folder, self.state.step, self.plan.total_steps)
        finally:
            self.watchdog.close()
            self.events.close()
            self.place.release()

    def _run(self) -> None:
        train = self.run_config.train
        self.metrics = Metrics(self.folder, self.state.step, self.plan.total_steps, self.groups.is_main, train.wandb)
        self.parts = StepParts(self.groups.device.type == "cuda")
        logged = self.state.step
        with self.metrics as metrics:
            self.watch = Stopwatch(self.state.tokens)
            for step, batches in enumerate(self._steps(), self.state.step + 1):
                self._mark("agreement")
                num_targets, stop = self._agree(batches)
                if stop:
                    self._stop()
                with profiled(self.folder / "profile", step, self.groups) if step == train.profile else nullcontext():
                    sums, result, lr = self._train_step(step, batches, num_targets)
                self.watch.step(self.writer.active)
                if self.started:
                    logger.info("first step after %.1f s", time.perf_counter() - self.started)
                    self.started = 0.0
                if self._is_due(step, train.log_every):
                    record = self._record(step, sums, lr, result.grad_norm)
                    record |= speed(self.watch.lap(self.state.tokens), self.config, self.groups)
                    metrics.write(record | self.parts.lap(step - logged))
                    self.events.write(b"")  # what a full disk may not have taken
                    logged = step
                metrics.advance(step)
                self._check_step(result.skipped)
                if step == 1 and not result.skipped and (names := without_gradient(self.engine, self.groups)):
                    logger.warning("no gradient has reached %s: what lies there will not learn", listed(names))
                if self._is_due(step, train.guard_every):
                    check_copies(self.engine, self.groups, step)
                with self.watch.paused():
                    if self._is_due(step, train.eval_every):
                        self._mark("evaluation")
                        losses = self.evaluate()
                        self.state = replace(self.state, valid_loss=losses["valid_loss"])
                        metrics.write({"step": step, "tokens": self.state.tokens, **losses})
                    if self.tasks is not None and self._is_due(step, train.task_every):
                        self._mark("evaluation")
                        metrics.write({"step": step, "tokens": self.state.tokens, **self.tasks(self)})
                    if self._is_due(step, train.observe_every):
                        seen = observe(self.engine.module, batches[0].to(self.groups.device), self.groups)
                        metrics.write({"step": step, "tokens": self.state.tokens, **seen})
                    if self._is_due(step, train.save_every):
                        self._mark("checkpoint")
                        self.save(wait=not train.save_background)
                self.watchdog.begin(step + 1)
                self._mark("data")
            if self.writer.active:
                self._saved(self.writer.wait())
            if train.save_every and self.saved_step != self.state.step:
                raise UserError(
                    f"the last step could not be saved in {self.folder}: make room there; the same command trains again "
                    f"from step {self.saved_step}"
                )

    def _is_due(self, step: int, every: int) -> bool:
        return every > 0 and (step % every == 0 or step == self.plan.total_steps)

    def _steps(self) -> Iterator[list[Batch]]:
        """The microbatches of each step to the end of the run, from part to part of the plan."""
        while self.state.step < self.plan.total_steps:
            part = self.plan.at(self.state.step)
            with self.watch.paused():
                self._enter(part)
            yield from make_loader(
                self.data,
                mixes=self.plan.mixes(self.config.data.path, self.state.skipped),
                seed=self.config.data.shuffle_seed,
                first_sample=self.plan.next_sample(self.state.step, self.state.skipped),
                num_samples=(min(part.last_step, self.plan.total_steps) - self.state.step) * part.batch_size,
                batch_size=part.batch_size,
                microbatch=self.config.train.microbatch_rows,
                rank=self.groups.data_rank,
                world_size=self.groups.data_size,
                num_workers=self.config.data.num_workers,
                prefetch=self.config.data.prefetch,
                timeout=self.config.data.timeout,
                one_document=self.config.data.one_document,
            )

    def _mark(self, phase: str) -> None:
        """A phase of the step begins."""
        self.watchdog.mark(phase)
        self.parts.mark(phase)

    def _check_step(self, skipped: bool) -> None:
        """Count steps that were skipped for NaN or Inf, on all ranks alike; too many in a row are a Rollback."""
        if not skipped:
            self.skipped_in_a_row = 0
            return
        self.skipped_in_a_row += 1
        if self.groups.is_main:
            event = {"event": "skipped", "step": self.state.step, "in_a_row": self.skipped_in_a_row}
            write_event(self.events, event)
        logger.warning("step %d has NaN or Inf in its gradients and changes nothing", self.state.step)
        if self.skipped_in_a_row >= self.run_config.train.max_skipped:
            raise Rollback

    def _roll_back(self) -> None:
        """Go back to the last checkpoint and pass over the rows that were read since."""
        step, self.skipped_in_a_row = self.state.step, 0
        if self.writer.active:
            self.writer.wait()
        found = self.place.find_again()
        if found is None:
            raise Stop(f"losses are NaN up to step {step} and there is no checkpoint to go back to", DIVERGED)
        reader = CheckpointReader(found)
        state, passed = reader.state, self.state.skipped
        if passed and passed[-1][0] == state.step:  # from memory: the main rank may have written its file already
            state = replace(state, skipped=passed)
        times = sum(at == state.step for at, _ in state.skipped)
        if times == MAX_ROLLBACKS:
            raise Stop(
                f"losses are NaN up to step {step}, after going back to step {state.step} {times} times with other rows: "
                "lower the learning rate or look at events.jsonl",
                DIVERGED,
            )
        rows = self.plan.rows_between(state.step, step)
        self.state = replace(state, skipped=(*state.skipped, (state.step, rows)))
        if self.groups.is_main:
            write_rollback(self.folder, self.state)
            write_event(self.events, {"event": "rollback", "step": step, "to": state.step, "rows": rows})
        logger.warning("NaN up to step %d: back to step %d, passing over %d rows", step, state.step, rows)
        self.part = self.plan.at(state.step)
        self.config = self.configs.of(self.part)
        self._open_data(None)
        self._rebuild(reader)

    def _enter(self, part: Part) -> None:
        """Make ready for a part of the plan; a stage with another model is built anew from a checkpoint of this one."""
        before, self.part, self.config = self.config, part, self.configs.of(part)
        if self.config.data != before.data:
            self._open_data(None)
        if self.config.model != before.model:
            self._save_now()
            stage = self.config.train.stages[part.stage].name
            if self.saved_step != self.state.step:
                raise UserError(
                    f"stage {stage} changes the model, and step {self.state.step} could not be saved in {self.folder}: make "
                    f"room there; the same command trains again from step {self.saved_step}"
                )
            logger.info("stage %s changes the model", stage)
            self._rebuild(CheckpointReader(checkpoint_path(self.folder / "checkpoints", self.state.step)))
        self.engine.set_batch_size(part.batch_size, self.config.train.microbatch_rows)

    def _rebuild(self, reader: CheckpointReader) -> None:
        """The engine anew, from a checkpoint."""
        self.reader, self.saved_step = reader, reader.state.step
        del self.engine
        gc.collect()
        if self.groups.device.type == "cuda":
            torch.cuda.empty_cache()
        self._build()

    def _agree(self, batches: list[Batch]) -> tuple[int, bool]:
        """What all ranks must know alike before a step: its target tokens, and whether any of them was asked to stop.

        Also commits a checkpoint that all of them have written by now.
        """
        asked = self.signals is not None and self.signals.received is not None
        targets = sum(batch.num_targets for batch in batches)
        sums = torch.tensor([targets, asked, self.writer.done, self.writer.failed, self.last_loss], dtype=torch.float64)
        dist.all_reduce(sums)
        num_targets, stop, written, failed, loss = sums.tolist()
        if self.last_targets and self.groups.is_main:
            loss /= self.groups.tensor_size * self.last_targets
            rows = range(self.state.samples - self.part.batch_size, self.state.samples)
            self.spikes.look(self.events, self.state.step, loss, rows, self.order)
        self.held = torch.cuda.memory_allocated() if self.groups.device.type == "cuda" else 0
        if written == self.groups.world_size:
            with self.watch.paused():
                self._saved(self.writer.finish(whole=not failed))
        self.last_targets = max(int(num_targets) // (self.groups.tensor_size * self.groups.context_size), 1)
        return self.last_targets, stop > 0

    def _stop(self) -> NoReturn:
        """Save the last step, if it is not saved, and leave."""
        self._save_now()
        reason = self.signals.received.name if self.signals and self.signals.received else "a signal to another rank"
        if self.saved_step != self.state.step:
            raise Stop(f"{reason}; step {self.state.step} could not be saved, {self.saved_step} was the last", SAVED)
        raise Stop(f"{reason}; step {self.state.step} is saved, the same command goes on", SAVED)

    def _save_now(self) -> None:
        """Make sure that the last step is saved."""
        if self.writer.active:
            self._saved(self.writer.wait())
        if self.state.step != self.saved_step:
            self.save(wait=True)

    def _train_step(self, step: int, batches: list[Batch], num_targets: int) -> tuple[Tensor, Any, float]:
        """One optimizer step. Returns this rank's `sums_by_source`, the engine's result and the learning rate."""
        config, groups = self.config, self.groups
        num_sources = len(self.data.names)
        sums = torch.zeros(2, num_sources, dtype=torch.float64, device=groups.device)
        for batch in batches:
            batch = take_share(batch, groups).to(groups.device, non_blocking=True)  # page-locked by the loader
            losses = self.engine.forward_backward(batch.tokens, batch.layout, batch.labels, num_targets)
            sums += sums_by_source(losses, batch, num_sources)
        tokens = self.state.tokens + self.part.tokens_per_step
        lr = learning_rate(config.train.stages, self.run_config.train.batch_size, tokens)
        result = self.engine.step(lr)
        self.last_loss = float(sums[0].sum())  # the step has ended: its gradient norm is known
        self.state = replace(
            self.state,
            step=step,
            valid_loss=None,
            applied_steps=self.state.applied_steps + (not result.skipped),
            tokens=tokens,
            samples=self.plan.next_sample(step - 1, self.state.skipped) + self.part.batch_size,
            data_fingerprint=self.data.fingerprint,
        )
        return sums, result, lr

    def _record(self, step: int, sums: Tensor, lr: float, grad_norm: float | None) -> dict[str, Any]:
        dist.all_reduce(sums, group=self.groups.replica_group)
        rows = dict(zip(self.data.names, self.order.taken(self.state.samples)))
        return step_record(self.config, step, self.state.tokens, sums, rows, lr, grad_norm)

    def evaluate(self) -> dict[str, float]:
        valid = open_data(self.config, "valid", fingerprint=self.data.fingerprint)
        return validation_losses(self.engine.module, valid, self.config, self.groups)

    def save(self, wait: bool = False) -> None:
        """Write a checkpoint of this step, in the background unless told to wait."""
        if self.writer.active:
            self._saved(self.writer.wait())
        self._start_save()
        if wait:
            self._saved(self.writer.wait())

    def _start_save(self) -> None:
        tokenizer = self.data.manifest["tokenizer"]
        files = {
            "config.yaml": to_yaml(self.config),
            "tokenizer.json": self.tokenizer,
            "boundaries.json": json.dumps({key: tokenizer[key] for key in ("bos_id", "eos_id")}),
        }
        self.writer.start(self.engine, self.state, files)

    def _saved(self, saved: Saved | None) -> None:
        if saved is not None:
            self.saved_step = saved.step
            self.metrics.write({"step": saved.step, **saved.record(), "save_dip": self.watch.dip()})
