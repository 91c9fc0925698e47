"""The plan of a run: the stage, batch size, row length and rows of each step. It depends only on the configuration.

A step belongs to the stage in which it ends, and the last step of the run may end beyond the last stage. If a stage or a
batch warmup changes the tokens per step, the tokens before it must be a whole number of steps.
"""

import os
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from ssscale.config.load import changed_model
from ssscale.config.schema import Config, ModelConfig, StageConfig
from ssscale.errors import UserError
from ssscale.model.flops import declared_weights

# Keys of `model` that a stage may change: they keep its weights, or define how new ones start.
CHANGEABLE = {"mixers", "mixer", "position"}


class Return(tuple[int, ...]):
    """That a run went back to a checkpoint after NaN: (step, rows, step, rows, ...), as `state.json` has it.

    The run went back to the first step, and leaves out what it had read since, `rows` rows after each `step`. There is one
    such pair per stage, because a stage may change the data folder or its mix.
    """

    @property
    def to(self) -> int:
        """The step of the checkpoint."""
        return self[0]

    @property
    def left_out(self) -> list[tuple[int, int]]:
        """(step, rows) of each stage."""
        return list(zip(self[::2], self[1::2], strict=True))


Returns = tuple[Return, ...]  # in the order in which they happened


def read_returns(saved: Any) -> Returns:
    """Returns the `Returns` of parsed JSON. Raises ValueError or TypeError if it has another form."""
    skipped = tuple(Return(int(number) for number in entry) for entry in saved)
    for entry in skipped:
        if not entry or len(entry) % 2 or min(entry) < 0 or 0 in entry[1::2]:
            raise ValueError(f"skipped: {entry} is not pairs of a step and a number of rows")
    return skipped


def folder_of(path: str) -> str:
    """Returns the same text for all spellings of a data folder, whose rows are counted together."""
    return path.rstrip("/") if "://" in path else os.path.abspath(path)


@dataclass(frozen=True)
class Part:
    """Consecutive steps of one stage with one batch size.

    batch_size: rows per step over all ranks. length: tokens per row.
    """

    stage: int
    batch_size: int
    length: int
    first_step: int  # number of steps before this part
    num_steps: int

    @property
    def tokens_per_step(self) -> int:
        return self.batch_size * self.length

    @property
    def last_step(self) -> int:
        return self.first_step + self.num_steps


def begun_model(before: ModelConfig, after: ModelConfig, length: int) -> ModelConfig:
    """Returns `after` with initial options (`Mixer.begun`) for mixers that replace other mixers of `before`.

    length: tokens per row in the training of `before`.
    """
    pairs = zip(before.layer_mixers, after.layer_mixers, strict=True)
    begun = {new.name: new.begun(after, length) for old, new in pairs if new.begins_from == old.name != new.name}
    return replace(after, mixer=replace(after.mixer, **begun))


def restarted_weights(before: Config, after: Config) -> set[str]:
    """Returns the weights whose start value a stage has changed by an option (`model.mixer.ssmax.scale`).

    before, after: the configurations of the stage before and of the stage. In layers that change their mixer, weights of the
    mixer before are kept.
    """
    old, new = (declared_weights(config.model, after.data.length) for config in (before, after))
    layers = enumerate(zip(before.model.layer_mixers, after.model.layer_mixers, strict=True))
    switched = tuple(f"blocks.{layer}.attention.weights." for layer, (was, now) in layers if was.name != now.name)
    changed = {name for name in old.keys() & new.keys() if old[name].start != new[name].start}
    return {name for name in changed if not name.startswith(switched)}


def stage_config(config: Config, index: int) -> Config:
    """Returns the configuration that stage `index` trains with. The changes of a stage also apply to all later stages.

    Raises UserError if a stage changes a key of the model that must stay the same.
    """
    model, data, train = config.model, config.data, config.train
    for number, stage in enumerate(train.stages[: index + 1]):
        if stage.model is not None:
            key = f"train.stages.{number}.model"
            for name in stage.model.keys() - CHANGEABLE:
                raise UserError(
                    f"{key}.{name}: a stage can change mixers, their options and position, not the model's sizes"
                )
            new = changed_model(model, stage.model, key)
            # Options of the stage itself override those of `Mixer.begun`.
            model = changed_model(begun_model(model, new, data.length), stage.model, key)
        if stage.length is not None:
            data = replace(data, length=stage.length)
        if stage.data_path is not None:
            data = replace(data, path=stage.data_path)
        if stage.batch_size is not None:
            train = replace(train, batch_size=stage.batch_size)
        if stage.microbatch is not None:
            train = replace(train, microbatch=stage.microbatch)
    return replace(config, model=model, data=data, train=train)


class Plan:
    """The plan of a run.

    Raises UserError if the tokens of a stage must be a whole number of steps and are not.
    """

    def __init__(self, config: Config) -> None:
        self.configs = [stage_config(config, index) for index in range(len(config.train.stages))]
        self.models = [own.model for own in self.configs]
        self.folders = [folder_of(own.data.path) for own in self.configs]
        self.parts: list[Part] = []
        step = tokens = end = 0
        left = 0  # tokens after the last whole step of the stages so far
        for index, stage in enumerate(config.train.stages):
            own = self.configs[index]
            end += stage.tokens
            for size, count, rest in self._sizes(own, stage, index, end - tokens):
                part = Part(index, size, own.data.length, step, count)
                if self.parts and self.parts[-1].tokens_per_step != part.tokens_per_step:
                    self._check_whole(left, stage, index)
                left = rest
                self.parts += [part] if count else []
                step, tokens = step + count, tokens + count * part.tokens_per_step
        self.total_steps = step if config.train.max_steps is None else min(step, config.train.max_steps)

    def _sizes(self, own: Config, stage: StageConfig, index: int, tokens: int) -> list[tuple[int, int, int]]:
        """Returns (batch size, steps, rest) for each batch size of a stage that has `tokens` left to train.

        rest: tokens after the last whole step, which belong to a step that ends in the next stage.
        """
        sizes = []
        for warmup in stage.batch_warmup:
            count, rest = divmod(warmup.tokens, warmup.batch_size * own.data.length)
            if rest or not count:
                size = warmup.batch_size * own.data.length
                raise UserError(
                    f"train.stages.{index}.batch_warmup: {warmup.tokens:,} tokens are not a whole number of steps of "
                    f"{size:,} tokens: use {count * size or size:,} or {(count + 1) * size:,}"
                )
            sizes.append((warmup.batch_size, count, 0))
            tokens -= warmup.tokens
        if tokens < 0:
            raise UserError(
                f"train.stages.{index}.batch_warmup takes {-tokens:,} tokens more than stage {stage.name!r} trains: "
                "give it fewer, or the stage more"
            )
        count, rest = divmod(tokens, own.tokens_per_step)
        last = index == len(self.configs) - 1
        return [*sizes, (own.train.batch_size, count + (last and rest > 0), rest)]

    def _check_whole(self, rest: int, stage: StageConfig, index: int) -> None:
        if not rest:
            return
        before, size = self.configs[index - 1], self.configs[index - 1].tokens_per_step
        tokens = before.train.stages[index - 1].tokens
        fewest = size + sum(warmup.tokens for warmup in before.train.stages[index - 1].batch_warmup)
        whole = [str(count) for count in (tokens - rest, tokens - rest + size) if count >= fewest]
        raise UserError(
            f"train.stages do not add up: stage {stage.name!r} changes the size of a step, but the stage before it ends "
            f"within a step of {size:,} tokens: use train.stages.{index - 1}.tokens={' or '.join(whole)}"
        )

    def at(self, step: int) -> Part:
        """Returns the `Part` to which the step after `step` steps belongs. At the end of the run, it is the last one."""
        return self.parts[min(bisect_right(self.ends, step), len(self.parts) - 1)]

    @cached_property
    def ends(self) -> list[int]:
        return [part.last_step for part in self.parts]

    @cached_property
    def total_tokens(self) -> int:
        """Tokens of all steps, including those of the last step beyond the last stage. `max_steps` is ignored."""
        return sum(part.num_steps * part.tokens_per_step for part in self.parts)

    def tokens(self, step: int) -> int:
        """Returns the tokens that the run has trained after `step` steps."""
        return sum(max(0, min(step - part.first_step, part.num_steps)) * part.tokens_per_step for part in self.parts)

    def mixes(self, path: str, skipped: Returns = ()) -> list[tuple[int, dict[str, float] | None]]:
        """Returns (first sample, mix) of each change of the stage that reads the data folder `path`, for `Order`.

        Rows that are left out are samples of the stage that had read them. So each source goes on after all its rows that
        were read, whatever the mix was.
        """
        found: list[tuple[int, dict[str, float] | None]] = []
        folder, samples, last = folder_of(path), 0, None
        for step, rows in self._read(skipped, 0, self.parts[-1].last_step):
            stage = self.at(step).stage
            if self.folders[stage] == folder:
                if stage != last:
                    found.append((samples, self.configs[stage].train.stages[stage].mix))
                samples, last = samples + rows, stage
        return found

    def next_sample(self, step: int, skipped: Returns = ()) -> int:
        """Returns the sample of its data folder with which the step after `step` steps begins."""
        folder = self.folder(step)
        before = tuple(rollback for rollback in skipped if rollback.to <= step)
        return sum(rows for at, rows in self._read(before, 0, step) if self.folder(at) == folder)

    def samples(self, step: int, skipped: Returns = ()) -> int:
        """Returns the samples that a run has read after `step` steps, of the data folder of the last of them."""
        return self.next_sample(step - 1, skipped) + self.at(step - 1).batch_size if step else 0

    def leave_out(self, skipped: Returns, step: int, to: int) -> Returns:
        """Returns `skipped` after the run goes back from `step` to the checkpoint of step `to`.

        All rows read since this checkpoint are left out. If the run had gone back to later checkpoints, which are lost,
        this includes the rows that it left out there.
        """
        kept = tuple(rollback for rollback in skipped if rollback.to <= to)
        read: list[int] = []
        for at, rows in self._read(skipped[len(kept) :], to, step):
            if read and self.at(read[-2]).stage == self.at(at).stage:
                read[-1] += rows
            else:
                read += [at, rows]
        return (*kept, Return(read))

    def folder(self, step: int) -> str:
        """Returns the data folder of the step after `step` steps, as `folder_of` spells it."""
        return self.folders[self.at(step).stage]

    def _read(self, skipped: Returns, first: int, last: int) -> Iterator[tuple[int, int]]:
        """Yields (step, rows read after it) in the order of reading, from `first` to `last` steps. Each pair is of one part.

        skipped: the times that the run went back in between.
        """
        for rollback in skipped:
            yield from self._rows(first, rollback.to)
            yield from rollback.left_out
            first = rollback.to
        yield from self._rows(first, last)

    def _rows(self, first: int, last: int) -> Iterator[tuple[int, int]]:
        for part in self.parts:
            begin, end = max(first, part.first_step), min(last, part.last_step)
            if begin < end:
                yield begin, (end - begin) * part.batch_size
