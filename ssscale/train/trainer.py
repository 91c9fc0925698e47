"""The training loop: batches → engine → metrics and checkpoints."""

import gc
import logging
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from ssscale.config import to_yaml
from ssscale.data.batch import Batch
from ssscale.data.stream import PackedData, make_loader, make_order, valid_batches
from ssscale.engine.deepspeed import DeepSpeedEngine
from ssscale.errors import SAVED, Stop, UserError
from ssscale.model.decoder import VOCAB_WEIGHTS
from ssscale.model.flops import PEAK_FLOPS, flops_per_token
from ssscale.model.init import initialize_weights
from ssscale.parallel.groups import Groups
from ssscale.schema import Compile, Config
from ssscale.train.build import build_model, choose_compile, choose_dtype, find_checkpoint
from ssscale.train.checkpoint import (
    CheckpointReader,
    TrainState,
    check_shapes,
    list_checkpoints,
    load_training_state,
    load_weights,
    newest_whole,
)
from ssscale.train.metrics import Metrics, Stopwatch, losses_by_source, mean_loss, sums_by_source
from ssscale.train.run_folder import check_folder, claim_folder
from ssscale.train.save import CheckpointWriter, Retention, Saved
from ssscale.train.schedule import learning_rate, stage_at
from ssscale.train.signals import StopSignals
from ssscale.train.stages import Part, Plan
from ssscale.train.switch import load_switched

logger = logging.getLogger("ssscale")


class Trainer:
    """A run: built from its configuration, resumed from its newest checkpoint, trained to its last stage's end."""

    def __init__(
        self, config: Config, groups: Groups, signals: StopSignals | None = None, slurm_job: str | None = None
    ) -> None:
        self.started = time.perf_counter()
        self.run_config, self.groups, self.signals = config, groups, signals
        self.folder = Path(config.folder)
        check_folder(self.folder, config)
        self.plan = Plan(config)
        self.total_steps = self.plan.total_steps
        self.reader = newest_whole(self.folder / "checkpoints", groups)
        self.state = self.reader.state if self.reader else TrainState()
        self.saved_step = self.state.step
        self.part = self.plan.at(self.state.step)
        self.config = self.plan.configs[self.part.stage]  # of the stage that is trained
        last = self.plan.configs[self.plan.at(max(self.state.step - 1, 0)).stage].data.path
        self._open_data(self.state.data_fingerprint or None if last == self.config.data.path else None)
        self.lock = claim_folder(self.folder, config, groups, slurm_job)
        retention = Retention(config.train.keep, config.train.keep_every, config.train.keep_best)
        self.writer = CheckpointWriter(self.folder / "checkpoints", groups, retention)
        self._build()

    def _open_data(self, trained_on: str | None) -> None:
        """The stage's data. trained_on: the fingerprint that the checkpoint gives it."""
        data = self.config.data
        self.data = self._open("train", None if data.accept_changed else trained_on)
        if trained_on not in (None, self.data.fingerprint):
            logger.warning("the data has changed since the checkpoint: going on at sample %d of it", self.state.samples)
        self.order = make_order(self.data, self.plan.mixes(data.path, self.state.skipped), data.shuffle_seed)

    def _open(self, split: str, fingerprint: str | None) -> PackedData:
        data, model = self.config.data, self.config.model
        return PackedData.open(
            data.path,
            split=split,
            cache=data.cache,
            cache_gb=data.cache_gb,
            vocab_size=model.vocab_size,
            length=data.length,
            fingerprint=fingerprint,
        )

    def _build(self) -> None:
        config, groups = self.config, self.groups
        torch.manual_seed(config.train.seed)
        dtype = choose_dtype(config.train.precision, groups.device)
        model = build_model(config, groups, dtype)
        self._log_choices(model, dtype)
        if self.reader is None:
            initialize_weights(model, config.model, groups, config.train.seed)
            if config.init_from is not None:
                source = find_checkpoint(Path(config.init_from), "init_from")
                load_switched(CheckpointReader(source), model, config.model, groups)
                logger.info("weights from %s, a new optimizer", source)
        else:
            check_shapes(self.reader, model, groups, VOCAB_WEIGHTS)
            load_weights(self.reader, model, groups)
        compiled = choose_compile(config, groups)
        if compiled == Compile.model:
            model.compile()
        elif compiled == Compile.block:
            model.compile_parts()
        self.engine = DeepSpeedEngine(model, config, groups)
        if self.reader is not None:
            load_training_state(self.reader, self.engine, groups)
            logger.info("resumed from %s (step %d)", self.reader.path, self.state.step)
        self.reader = None

    def _log_choices(self, model: torch.nn.Module, dtype: torch.dtype) -> None:
        """What was chosen, once a run."""
        from kernels.softmax import choose_backend

        config, groups = self.config, self.groups
        core = config.model.attention.core.value
        method = config.model.position.method.value
        if method in ("alibi", "fire"):
            core += f" with {method} in " + ("FlexAttention" if groups.device.type == "cuda" else "plain torch")
        elif core != "stickbreaking":
            deterministic = torch.are_deterministic_algorithms_enabled()
            size, window = config.model.head_size, config.model.position.window
            core += f" on {choose_backend(groups.device, dtype, size, config.data.length, window, deterministic)}"
        logger.info("model: %s parameters, attention %s", f"{model.num_parameters():,}", core)
        logger.info(
            "precision %s, compile %s, ZeRO stage %d, tensor parallel %d%s, data parallel %d, device %s",
            str(dtype).removeprefix("torch."),
            choose_compile(config, groups).value,
            config.parallel.zero_stage,
            groups.tensor_size,
            " with sequence parallel" if config.parallel.sequence and groups.tensor_size > 1 else "",
            groups.data_size,
            torch.cuda.get_device_name(groups.device) if groups.device.type == "cuda" else "cpu",
        )

    def run(self) -> None:
        """Train to the end, saving, evaluating and logging at their intervals. Returns at once for a finished run.

        Raises Stop where the run ends before its last step.
        """
        try:
            if self.state.step >= self.total_steps:
                if self.total_steps == 0 and not list_checkpoints(self.folder / "checkpoints"):
                    self._start_save()  # the weights that the run begins with are what was asked for
                    if self.writer.wait() is None:
                        raise UserError(f"the weights could not be saved in {self.folder}: make room there")
                logger.info("%s is finished: step %d of %d", self.folder, self.state.step, self.total_steps)
            else:
                self._run()
        finally:
            if self.lock is not None:
                self.lock.release()

    def _run(self) -> None:
        train = self.run_config.train
        self.metrics = Metrics(self.folder, self.state.step, self.total_steps, self.groups.is_main)
        with self.metrics as metrics:
            self.watch = Stopwatch(self.state.tokens)
            for step, batches in enumerate(self._steps(), self.state.step + 1):
                num_targets, stop = self._agree(batches)
                if stop:
                    self._stop()
                sums, result, lr = self._train_step(step, batches, num_targets)
                self.watch.step(self.writer.active)
                if self.started:
                    logger.info("first step after %.1f s", time.perf_counter() - self.started)
                    self.started = 0.0
                if self._is_due(step, train.log_every):
                    record = self._record(step, sums, lr, result.grad_norm)
                    metrics.write(record | self._speed(self.watch.lap(self.state.tokens)))
                metrics.advance(step)
                with self.watch.paused():
                    if self._is_due(step, train.eval_every):
                        losses = self.evaluate()
                        self.state = replace(self.state, valid_loss=losses["valid_loss"])
                        metrics.write({"step": step, "tokens": self.state.tokens, **losses})
                    if self._is_due(step, train.save_every):
                        self.save(wait=not train.save_background)
            if self.writer.active:
                self._saved(self.writer.wait())
            if train.save_every and self.saved_step != self.state.step:
                raise UserError(
                    f"the last step could not be saved in {self.folder}: make room there; the same command trains again "
                    f"from step {self.saved_step}"
                )

    def _is_due(self, step: int, every: int) -> bool:
        return every > 0 and (step % every == 0 or step == self.total_steps)

    def _steps(self) -> Iterator[list[Batch]]:
        """The microbatches of each step to the end of the run, from part to part of the plan."""
        while self.state.step < self.total_steps:
            part = self.plan.at(self.state.step)
            with self.watch.paused():
                self._enter(part)
            yield from make_loader(
                self.data,
                mixes=self.plan.mixes(self.config.data.path, self.state.skipped),
                seed=self.config.data.shuffle_seed,
                first_sample=self.plan.next_sample(self.state.step, self.state.skipped),
                num_samples=(min(part.last_step, self.total_steps) - self.state.step) * part.batch_size,
                batch_size=part.batch_size,
                microbatch=self.config.train.microbatch,
                rank=self.groups.data_rank,
                world_size=self.groups.data_size,
                num_workers=self.config.data.num_workers,
                prefetch=self.config.data.prefetch,
                timeout=self.config.data.timeout,
                one_document=self.config.data.one_document,
            )

    def _enter(self, part: Part) -> None:
        """Make ready for a part of the plan; a stage with another model is built anew from a checkpoint of this one."""
        before, self.part, self.config = self.config, part, self.plan.configs[part.stage]
        if self.config.data != before.data:
            self._open_data(None)
        if self.config.model != before.model:
            self._save_now()
            logger.info("stage %s changes the model", self.config.train.stages[part.stage].name)
            self._rebuild()
        self.engine.set_batch_size(part.batch_size, self.config.train.microbatch)

    def _rebuild(self) -> None:
        """The engine anew, from the newest checkpoint."""
        self.reader = CheckpointReader(list_checkpoints(self.folder / "checkpoints")[-1])
        self.state = self.reader.state
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
        sums = torch.tensor([targets, asked, self.writer.done, self.writer.failed])
        dist.all_reduce(sums)
        num_targets, stop, written, failed = sums.tolist()
        if written == self.groups.world_size:
            with self.watch.paused():
                self._saved(self.writer.finish(whole=not failed))
        return max(num_targets // self.groups.tensor_size, 1), stop > 0

    def _stop(self) -> NoReturn:
        """Save the last step, if it is not saved, and leave."""
        self._save_now()
        received = self.signals.received if self.signals else None
        reason = received.name if received else "a signal to another rank"
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
            batch = batch.to(groups.device, non_blocking=True)  # page-locked by the loader
            losses = self.engine.forward_backward(batch.tokens, batch.layout, batch.labels, num_targets)
            sums += sums_by_source(losses, batch, num_sources)
        tokens = self.state.tokens + self.part.tokens_per_step
        lr = learning_rate(config.train.stages, self.run_config.train.batch_size, tokens)
        result = self.engine.step(lr)
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
        dist.all_reduce(sums, group=self.groups.data_group)
        names, seen = self.data.names, self.order.taken(self.state.samples)
        index, _ = stage_at(self.config.train.stages, self.state.tokens)
        return {
            "step": step,
            "tokens": self.state.tokens,
            "stage": self.config.train.stages[index].name,
            "loss": mean_loss(sums),
            "lr": lr,
            "grad_norm": grad_norm,
            **losses_by_source(sums, names, "loss"),
            **{f"tokens/{name}": rows * self.config.data.length for name, rows in zip(names, seen)},
        }

    def _speed(self, rate: float) -> dict[str, float]:
        speed = {"tokens_per_second": rate}
        if self.groups.device.type == "cuda":
            peak = PEAK_FLOPS * self.groups.world_size
            for name, half in (("mfu", False), ("mfu_causal", True)):
                per_token = flops_per_token(self.config.model, self.config.data.length, causal_half=half)
                speed[name] = rate * per_token / peak
            speed["memory_gib"] = torch.cuda.max_memory_allocated() / 2**30
        return speed

    @torch.no_grad()
    def evaluate(self) -> dict[str, float]:
        """Mean loss in nats a token over `eval_rows` rows of the validation split, in all and by source."""
        config, groups = self.config, self.groups
        data = self._open("valid", self.data.fingerprint)
        sums = torch.zeros(2, len(data.names), dtype=torch.float64, device=groups.device)
        self.engine.module.eval()
        batches = valid_batches(
            data,
            rows=config.train.eval_rows,
            microbatch=config.train.microbatch,
            rank=groups.data_rank,
            world_size=groups.data_size,
            one_document=config.data.one_document,
        )
        for batch in batches:
            batch = batch.to(groups.device)
            losses = self.engine.module(batch.tokens, batch.layout, batch.labels)
            sums += sums_by_source(losses, batch, len(data.names))
        self.engine.module.train()
        dist.all_reduce(sums, group=groups.data_group)
        return {"valid_loss": mean_loss(sums), **losses_by_source(sums, data.names, "valid_loss")}

    def save(self, wait: bool = False) -> None:
        """Write a checkpoint of this step, in the background unless told to wait."""
        if self.writer.active:
            self._saved(self.writer.wait())
        self._start_save()
        if wait:
            self._saved(self.writer.wait())

    def _start_save(self) -> None:
        files = {"config.yaml": to_yaml(self.config), "tokenizer.json": Path(self.data.tokenizer_file).read_text()}
        self.writer.start(self.engine, self.state, files)

    def _saved(self, saved: Saved | None) -> None:
        if saved is None:
            return
        self.saved_step = saved.step
        record: dict[str, Any] = {"step": self.state.step, "saved_step": saved.step, "save_blocked_s": saved.blocked_s}
        record |= {"save_written_s": saved.written_s, "save_bytes": saved.bytes, "save_dip": self.watch.dip()}
        self.metrics.write(record)
