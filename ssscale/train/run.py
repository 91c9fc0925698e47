"""The state of a run across its steps: how it opens, resumes, changes stages, rolls back and stops."""

import gc
import logging
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import NoReturn, Protocol

import torch

from ssscale.config.choices import Compile
from ssscale.config.schema import Config
from ssscale.data.batch import Batch
from ssscale.engine.deepspeed import DeepSpeedEngine
from ssscale.errors import DIVERGED, SAVED, Stop, UserError
from ssscale.model.decoder import VOCAB_WEIGHTS
from ssscale.model.graphs import BlockGraphs, record_blocks
from ssscale.model.init import initialize_weights
from ssscale.parallel.exchange import gather_json
from ssscale.parallel.groups import Groups
from ssscale.train.build import build_model, choose_dtype, log_choices
from ssscale.train.checkpoint import CheckpointReader, TrainState, check_shapes, load_training_state, load_weights
from ssscale.train.checkpoint_folder import checkpoint_path, saved_config
from ssscale.train.claim import RunFolder
from ssscale.train.clock import Phases, Stopwatch
from ssscale.train.faults import open_events, write_event, write_start
from ssscale.train.hooks.base import Hook
from ssscale.train.hooks.checkpointing import Checkpointing
from ssscale.train.metrics import Metrics
from ssscale.train.microbatch import StageConfigs
from ssscale.train.peers import Peers, Where
from ssscale.train.reading import reading
from ssscale.train.run_folder import read_rollback, write_rollback
from ssscale.train.same_tokens import TOKENIZER, check_tokenizer, saved_tokenizer
from ssscale.train.signals import StopSignals
from ssscale.train.stages import Part, Plan, restarted_weights
from ssscale.train.step import Done
from ssscale.train.switch import check_heads, load_switched
from ssscale.train.watchdog import Watchdog
from ssscale.validate_graphs import records_blocks

logger = logging.getLogger("ssscale")

MAX_ROLLBACKS = 3  # to the same checkpoint


class Source(Protocol):
    """Where the batches come from: the rows of one data folder, or examples for fine-tuning."""

    @property
    def names(self) -> Sequence[str]:
        """Names of the sources, in the order in which `Batch.sources` counts them."""

    @property
    def fingerprint(self) -> str:
        """Identifies the data. Resuming with another fingerprint needs `data.accept_changed`."""

    @property
    def vocab_size(self) -> int | None:
        """Number of entries of the tokenizer; None if it is not known."""

    def steps(self, config: Config, part: Part, state: TrainState) -> Generator[Sequence[Batch]]:
        """Yields this rank's microbatches of each step of `part` that comes after `state`."""

    def divisor(self, num_targets: int) -> int:
        """Returns the number by which the summed losses of a step are divided. num_targets: its targets over all ranks."""

    def computed(self, state: TrainState) -> int:
        """Returns the tokens of all samples so far. Only the differences of two calls count, for the speed of training."""

    def counts(self, samples: int) -> Mapping[str, int]:
        """Returns metrics about the first `samples` samples, such as the tokens of each source."""

    def rows(self, samples: range) -> Mapping[str, Sequence[int]]:
        """Returns the rows of these samples by source, for events.jsonl."""

    def files(self) -> Mapping[str, str]:
        """Returns text files that a checkpoint keeps beside the weights, by name."""


class OpenSource(Protocol):
    def __call__(self, config: Config, plan: Plan, state: TrainState, trained_on: str | None) -> Source:
        """Opens the data of a stage.

        trained_on: the fingerprint of this data in the checkpoint from which the run resumes; None skips the check.
        Raises UserError if the data cannot be opened, does not fit the run, or has changed.
        """


class Run:
    """A run, built from its configuration and its newest checkpoint. `ssscale.train.loop.train` trains it.

    config: the configuration of the current stage. given: the configuration of the whole run.
    state: the progress after the last step. last: the result of the last step; None after a start, a rollback
    or a change of the model.
    Raises UserError if the run cannot start.
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
        """hooks: called in their order, before the hook that saves checkpoints. signals: requests to stop.

        init_key: the name of `config.init_from` in messages.
        """
        self.started = time.perf_counter()
        self.given, self.groups, self.signals, self.init_key = config, groups, signals, init_key
        self.folder, self.plan, self.open_source = Path(config.folder), Plan(config), open_source
        self.last: Done | None = None
        self.memory = 0  # bytes that stay allocated on the GPU between two steps
        self.graphs: BlockGraphs | None = None
        self.peers = Peers(self.folder, groups)
        self.place = RunFolder(self.folder, config, groups, slurm_job)
        self.watchdog = Watchdog(self.folder, groups.rank, groups.world_size, config.train.watchdog)
        self.metrics = Metrics(self.folder, self.plan.total_steps, groups.is_main, config.train.wandb)
        with self.peers.telling(lambda: Where(config, 0, "start", 0)), self.place.opening():
            found = self.place.choice.path
            reader = CheckpointReader(found) if found else None
            self.state = read_rollback(self.folder, reader.state) if reader else TrainState()
            self._check_stages()
            self.watch, self.phases = Stopwatch(self.state.tokens), Phases(False, self.state.step)
            self.configs = StageConfigs(self.plan, groups)
            self.events = open_events(self.folder)
            self.part = self.plan.at(self.state.step)
            self.config = self.configs.of(self.part)
            same = self.plan.folder(max(self.state.step - 1, 0)) == self.plan.folder(self.state.step)
            trained_on = self.state.data_fingerprint or None if same else None
            self.source = open_source(self.config, self.plan, self.state, trained_on)
            if reader is not None:
                check_tokenizer(self.source, saved_tokenizer(reader.path), str(reader.path), self.config)
            self.place.take(config)
            self.peers.open()
            self.saving = Checkpointing(self.folder, config, groups, self.state.step)
            self.hooks = [*hooks, self.saving]
            self.engine = self._build(reader)

    @property
    def finished(self) -> bool:
        return self.state.step >= self.plan.total_steps

    def mark(self, phase: str) -> None:
        """Records that a phase of the step begins, for the watchdog and the clocks."""
        self.watchdog.mark(phase)
        self.phases.mark(phase)

    @contextmanager
    def going_on(self) -> Iterator[None]:
        """Runs the watchdog while the body trains, and reports an error to the other ranks. Releases the folder at the end."""
        self.watchdog.start()
        if self.groups.is_main and not self.finished:
            place = self.place
            write_start(self.events, self.state.step, self.groups.world_size, place.choice.path, place.slurm_job)
        with self.peers.telling(lambda: Where(self.config, self.state.step + 1, self.watchdog.phase, self.memory)):
            try:
                yield
            finally:
                self.watchdog.close()
                self.events.close()
                self.place.release()

    def start_clocks(self) -> None:
        self.phases = Phases(self.groups.device.type == "cuda", self.state.step)
        self.watch = Stopwatch(self.source.computed(self.state))

    def measure_memory(self) -> None:
        self.memory = torch.cuda.memory_allocated() if self.groups.device.type == "cuda" else 0

    def complete(self, done: Done) -> None:
        """Updates the progress of the run after a step."""
        state = self.state
        self.last = done
        self.state = replace(
            state,
            step=state.step + 1,
            valid_loss=None,
            applied_steps=state.applied_steps + (not done.skipped),
            tokens=state.tokens + self.part.tokens_per_step,
            samples=self.plan.samples(state.step + 1, state.skipped),
            data_fingerprint=self.source.fingerprint,
        )
        self.watch.step(self.saving.writer.active)
        if self.started:
            logger.info("first step after %.1f s", time.perf_counter() - self.started)
            self.started = 0.0

    def _check_stages(self) -> None:
        """Raises UserError if the checkpoint was trained by other stages: its rows and learning rates would not go on."""
        state, plan = self.state, self.plan
        for did, was, now in (
            ("trained {:,} tokens", state.tokens, plan.tokens(state.step)),
            ("read {:,} rows of its data folder", state.samples, plan.samples(state.step, state.skipped)),
        ):
            if was != now:
                raise UserError(
                    f"train.stages: step {state.step} of the run in {self.folder} has {did.format(was)}, and by the stages as "
                    f"given {now:,}: give the stages and data up to there as they were, or run_dir=FOLDER for a new run"
                )

    def begin_step(self) -> None:
        self.watchdog.begin(self.state.step + 1)

    def enter(self, part: Part) -> None:
        """Prepares the run for a `Part` of its plan. A stage with another model is built from a checkpoint of the current one.

        Raises UserError if that checkpoint cannot be saved, or if the data of the stage cannot be opened.
        """
        before, after = self.config, self.configs.of(part)
        opens, rebuilds = after.data != before.data, after.model != before.model
        # Before anything changes: a checkpoint names the model that its weights were trained with, and nothing is lost if
        # the data cannot be opened.
        saved = self.saving.save_now(self) if rebuilds or (opens and self.saving.every) else False
        self.part, self.config = part, after
        if opens:
            used = self.source
            self.source = self.open_source(after, self.plan, self.state, None)
            check_tokenizer(self.source, used.files().get(TOKENIZER), f"the stage before, {before.data.path}", after)
        if rebuilds:
            stage = after.train.stages[part.stage].name
            if not saved:
                raise UserError(
                    f"stage {stage} changes the model, and step {self.state.step} could not be saved in {self.folder}: make "
                    f"room there; the same command trains again from step {self.saving.saved_step}"
                )
            logger.info("stage %s changes the model", stage)
            self._rebuild(CheckpointReader(checkpoint_path(self.folder / "checkpoints", self.state.step)))
        self.engine.set_batch_size(part.batch_size, self.config.train.microbatch_rows)

    def roll_back(self) -> None:
        """Goes back to the last checkpoint, and leaves out the rows of all data folders that were read since then.

        Raises Stop if there is no checkpoint, or if the run has gone back to it MAX_ROLLBACKS times.
        """
        step = self.state.step
        if self.saving.writer.active:
            self.saving.writer.wait()
        found = self.place.find_again()
        if found is None:
            raise Stop(f"losses are NaN up to step {step} and there is no checkpoint to go back to", DIVERGED)
        reader = CheckpointReader(found)
        # What was left out before is not read from the rollback file, which the main rank may have changed.
        state, before = reader.state, self.state.skipped
        times = sum(rollback.to == state.step for rollback in before)
        if times == MAX_ROLLBACKS:
            raise Stop(
                f"losses are NaN up to step {step}, after going back to step {state.step} {times} times with other rows: "
                "lower the learning rate or look at events.jsonl",
                DIVERGED,
            )
        self.state = replace(state, skipped=self.plan.leave_out(before, step, state.step))
        rows = sum(rows for _, rows in self.state.skipped[-1].left_out)
        if self.groups.is_main:
            write_rollback(self.folder, self.state)
            write_event(self.events, {"event": "rollback", "step": step, "to": state.step, "rows": rows})
        logger.warning("NaN up to step %d: back to step %d, passing over %d rows", step, state.step, rows)
        self.part = self.plan.at(state.step)
        self.config = self.configs.of(self.part)
        self.source = self.open_source(self.config, self.plan, self.state, None)
        self._rebuild(reader)

    def stop(self) -> NoReturn:
        """Saves the last step unless it is saved already, and raises Stop. Before the first step, there is nothing to save."""
        reason = self.signals.received.name if self.signals and self.signals.received else "a signal to another rank"
        if self.state.step == 0:
            raise Stop(f"{reason} before the first step; the same command starts the run", SAVED)
        saved = self.saving.save_now(self)
        if not saved:
            newest = self.saving.saved_step
            raise Stop(f"{reason}; step {self.state.step} could not be saved; the last saved step is {newest}", SAVED)
        raise Stop(f"{reason}; step {self.state.step} is saved, the same command continues", SAVED)

    def end_unread(self, error: UserError | None) -> NoReturn:
        """Saves the last step and raises the UserError of the first rank that could not read its data, on all ranks.

        error: of this rank, or None if it has read its own.
        """
        said = next(text for text in gather_json(None if error is None else str(error)) if text is not None)
        if self.state.step == 0:
            raise UserError(said)
        if self.saving.save_now(self):
            raise UserError(f"{said}; step {self.state.step} is saved, the same command continues with whole data")
        raise UserError(
            f"{said}; step {self.state.step} could not be saved, the last saved one is {self.saving.saved_step}"
        )

    def _rebuild(self, reader: CheckpointReader) -> None:
        """Frees the engine and builds it again from a checkpoint."""
        self.saving.saved_step = reader.state.step
        self.engine.wait_for_weights()
        del self.engine
        self.graphs = None
        gc.collect()
        if self.groups.device.type == "cuda":
            torch.cuda.empty_cache()
        self.engine = self._build(reader)

    def _restarted(self, reader: CheckpointReader | None) -> frozenset[str]:
        """Returns the weights that start again in a stage that begins with the next step."""
        begins = next(part.first_step for part in self.plan.parts if part.stage == self.part.stage)
        if reader is None or reader.state.step != begins:
            return frozenset()
        found = frozenset(restarted_weights(saved_config(reader.path), self.config))
        if found:
            name = self.config.train.stages[self.part.stage].name
            logger.info(
                "stage %s changes the start of %s, which replaces what was trained", name, ", ".join(sorted(found))
            )
        return found

    def _build(self, reader: CheckpointReader | None) -> DeepSpeedEngine:
        config, groups = self.config, self.groups
        torch.manual_seed(config.train.seed)
        dtype = choose_dtype(config.train.precision, groups.device)
        model = build_model(config, groups, dtype)
        restarted = self._restarted(reader)
        log_choices(model, config, groups, dtype, self.source.vocab_size)
        if reader is None:
            initialize_weights(model, config.model, groups, config.train.seed)
            if config.init_from is not None:
                with reading(Path(config.init_from), groups, self.init_key, newest=True) as source:
                    check_tokenizer(self.source, saved_tokenizer(source), str(source), config)
                    load_switched(CheckpointReader(source), model, config.model, groups)
                logger.info("initial weights from %s; the optimizer starts from zero", source)
        else:
            check_heads(reader.path, config.model)
            check_shapes(reader, model, groups, VOCAB_WEIGHTS)
            load_weights(reader, model, groups, restarted)
        compiled = config.compiled(groups.on_gpu)
        if compiled == Compile.model:
            model.compile()
        elif compiled == Compile.block:
            model.compile_parts(within_hooks=config.gathers_blocks(groups.on_gpu))
            if records_blocks(config, groups.on_gpu):
                self.graphs = record_blocks(model, config)
        engine = DeepSpeedEngine(model, config, groups, self.mark)
        self.last = None
        if reader is not None:
            load_training_state(reader, engine, groups, restarted)
            logger.info("resumed from %s (step %d)", reader.path, self.state.step)
        if config.train.save_every:
            self.saving.writer.prepare(engine)
        return engine
