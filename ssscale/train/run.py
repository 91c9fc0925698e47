"""What lives across the steps of a run: it opens, resumes, changes stages, rolls back and stops here."""

import gc
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import NoReturn, Protocol

import torch

from ssscale.config.schema import Compile, Config
from ssscale.data.batch import Batch
from ssscale.engine.deepspeed import DeepSpeedEngine
from ssscale.errors import DIVERGED, SAVED, Stop, UserError
from ssscale.model.decoder import VOCAB_WEIGHTS
from ssscale.model.init import initialize_weights
from ssscale.parallel.groups import Groups
from ssscale.train.build import build_model, choose_compile, choose_dtype, log_choices
from ssscale.train.checkpoint import CheckpointReader, TrainState, check_shapes, load_training_state, load_weights
from ssscale.train.checkpoint_folder import checkpoint_path
from ssscale.train.claim import RunFolder
from ssscale.train.clock import Phases, Stopwatch
from ssscale.train.faults import open_events, write_event
from ssscale.train.hooks.base import Hook
from ssscale.train.hooks.checkpointing import Checkpointing
from ssscale.train.metrics import Metrics
from ssscale.train.microbatch import StageConfigs
from ssscale.train.peers import Peers, Where
from ssscale.train.reading import reading
from ssscale.train.run_folder import read_rollback, write_rollback
from ssscale.train.signals import StopSignals
from ssscale.train.stages import Part, Plan
from ssscale.train.step import Done
from ssscale.train.switch import load_switched
from ssscale.train.watchdog import Watchdog

logger = logging.getLogger("ssscale")

MAX_ROLLBACKS = 3  # to one checkpoint


class Source(Protocol):
    """Where batches come from: the rows of one data folder, or examples."""

    @property
    def names(self) -> Sequence[str]:
        """Of what `Batch.sources` numbers."""

    @property
    def fingerprint(self) -> str:
        """Of what is read: a run goes on with the same."""

    @property
    def vocab_size(self) -> int | None:
        """Entries of the tokenizer, where they are known."""

    def steps(self, config: Config, part: Part, state: TrainState) -> Iterator[Sequence[Batch]]:
        """This rank's microbatches of each step that is left of a part."""

    def divisor(self, num_targets: int) -> int:
        """What the summed losses of a step are divided by. num_targets: its tokens with a target, over all ranks."""

    def counts(self, samples: int) -> Mapping[str, int]:
        """What metrics say of the first `samples` samples."""

    def rows(self, samples: range) -> Mapping[str, Sequence[int]]:
        """The rows by source that these samples are."""

    def files(self) -> Mapping[str, str]:
        """What a checkpoint keeps beside the weights: file names and texts."""


class OpenSource(Protocol):
    def __call__(self, config: Config, plan: Plan, state: TrainState, trained_on: str | None) -> Source:
        """Open what a stage reads. trained_on: its fingerprint in the checkpoint that is gone on with. Raises UserError."""


class Run:
    """A run: built from its configuration, resumed from its newest checkpoint. `ssscale.train.loop.train` trains it.

    config: of the stage that is trained; given: as the user gave it. last: the newest step, None after a start or a rollback.
    """

    def __init__(
        self,
        config: Config,
        groups: Groups,
        open_source: OpenSource,
        hooks: Sequence[Hook],
        *,
        signals: StopSignals | None = None,
        slurm_job: str | None = None,
        init_key: str = "init_from",
    ) -> None:
        """hooks: beside checkpoints. init_key: what `config.init_from` is called in sentences."""
        self.started = time.perf_counter()
        self.given, self.groups, self.signals, self.init_key = config, groups, signals, init_key
        self.folder, self.plan, self.open_source = Path(config.folder), Plan(config), open_source
        self.last: Done | None = None
        self.memory = 0  # bytes of the GPU's that stay allocated between two steps
        self.peers = Peers(self.folder, groups)
        self.place = RunFolder(self.folder, config, groups, slurm_job)
        self.watchdog = Watchdog(self.folder, groups.rank, groups.world_size, config.train.watchdog)
        self.metrics = Metrics(self.folder, self.plan.total_steps, groups.is_main, config.train.wandb)
        with self.peers.telling(lambda: Where(config, 0, "start", 0)), self.place.opening():
            found = self.place.choice.path
            reader = CheckpointReader(found) if found else None
            self.state = read_rollback(self.folder, reader.state) if reader else TrainState()
            self.watch, self.phases = Stopwatch(self.state.tokens), Phases(False, self.state.step)
            self.configs = StageConfigs(self.plan, groups)
            self.events = open_events(self.folder)
            self.part = self.plan.at(self.state.step)
            self.config = self.configs.of(self.part)
            last = self.plan.configs[self.plan.at(max(self.state.step - 1, 0)).stage].data.path
            trained_on = self.state.data_fingerprint or None if last == self.config.data.path else None
            self.source = open_source(self.config, self.plan, self.state, trained_on)
            self.place.take(config)
            self.peers.open()
            self.saving = Checkpointing(self.folder, config, groups, self.state.step)
            self.hooks = [*hooks, self.saving]
            self.engine = self._build(reader)

    @property
    def finished(self) -> bool:
        return self.state.step >= self.plan.total_steps

    def mark(self, phase: str) -> None:
        """A phase of the step begins."""
        self.watchdog.mark(phase)
        self.phases.mark(phase)

    @contextmanager
    def going_on(self) -> Iterator[None]:
        """While the run trains: the watchdog watches, and what ends a rank is told to the others."""
        self.watchdog.start()
        with self.peers.telling(lambda: Where(self.config, self.state.step + 1, self.watchdog.phase, self.memory)):
            try:
                yield
            finally:
                self.watchdog.close()
                self.events.close()
                self.place.release()

    def start_clocks(self) -> None:
        self.phases = Phases(self.groups.device.type == "cuda", self.state.step)
        self.watch = Stopwatch(self.state.tokens)

    def measure_memory(self) -> None:
        self.memory = torch.cuda.memory_allocated() if self.groups.device.type == "cuda" else 0

    def complete(self, done: Done) -> None:
        """A step has ended."""
        state = self.state
        self.last = done
        self.state = replace(
            state,
            step=state.step + 1,
            valid_loss=None,
            applied_steps=state.applied_steps + (not done.skipped),
            tokens=state.tokens + self.part.tokens_per_step,
            samples=self.plan.next_sample(state.step, state.skipped) + self.part.batch_size,
            data_fingerprint=self.source.fingerprint,
        )
        self.watch.step(self.saving.writer.active)
        if self.started:
            logger.info("first step after %.1f s", time.perf_counter() - self.started)
            self.started = 0.0

    def begin_step(self) -> None:
        self.watchdog.begin(self.state.step + 1)
        self.mark("data")

    def enter(self, part: Part) -> None:
        """Make ready for a part of the plan; a stage with another model is built again from a checkpoint of this one."""
        before, self.part, self.config = self.config, part, self.configs.of(part)
        if self.config.data != before.data:
            self.source = self.open_source(self.config, self.plan, self.state, None)
        if self.config.model != before.model:
            stage = self.config.train.stages[part.stage].name
            if not self.saving.save_now(self):
                raise UserError(
                    f"stage {stage} changes the model, and step {self.state.step} could not be saved in {self.folder}: make "
                    f"room there; the same command trains again from step {self.saving.saved_step}"
                )
            logger.info("stage %s changes the model", stage)
            self._rebuild(CheckpointReader(checkpoint_path(self.folder / "checkpoints", self.state.step)))
        self.engine.set_batch_size(part.batch_size, self.config.train.microbatch_rows)

    def roll_back(self) -> None:
        """Go back to the last checkpoint and pass over the rows that were read since. Raises Stop."""
        step = self.state.step
        if self.saving.writer.active:
            self.saving.writer.wait()
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
        self.source = self.open_source(self.config, self.plan, self.state, None)
        self._rebuild(reader)

    def stop(self) -> NoReturn:
        """Save the last step, if it is not saved, and leave."""
        saved = self.saving.save_now(self)
        reason = self.signals.received.name if self.signals and self.signals.received else "a signal to another rank"
        if not saved:
            newest = self.saving.saved_step
            raise Stop(f"{reason}; step {self.state.step} could not be saved, {newest} was the last", SAVED)
        raise Stop(f"{reason}; step {self.state.step} is saved, the same command goes on", SAVED)

    def _rebuild(self, reader: CheckpointReader) -> None:
        """The engine again, from a checkpoint."""
        self.saving.saved_step = reader.state.step
        del self.engine
        gc.collect()
        if self.groups.device.type == "cuda":
            torch.cuda.empty_cache()
        self.engine = self._build(reader)

    def _build(self, reader: CheckpointReader | None) -> DeepSpeedEngine:
        config, groups = self.config, self.groups
        torch.manual_seed(config.train.seed)
        dtype = choose_dtype(config.train.precision, groups.device)
        model = build_model(config, groups, dtype)
        log_choices(model, config, groups, dtype, self.source.vocab_size)
        if reader is None:
            initialize_weights(model, config.model, groups, config.train.seed)
            if config.init_from is not None:
                with reading(Path(config.init_from), groups, self.init_key, newest=True) as source:
                    load_switched(CheckpointReader(source), model, config.model, groups)
                logger.info("weights from %s, a new optimizer", source)
        else:
            check_shapes(reader, model, groups, VOCAB_WEIGHTS)
            load_weights(reader, model, groups)
        compiled = choose_compile(config, groups.device)
        if compiled == Compile.model:
            model.compile()
        elif compiled == Compile.block:
            model.compile_parts()
        engine = DeepSpeedEngine(model, config, groups, self.mark)
        self.last = None
        if reader is not None:
            load_training_state(reader, engine, groups)
            logger.info("resumed from %s (step %d)", reader.path, self.state.step)
        if config.train.save_every:
            self.saving.writer.prepare(engine)
        return engine
