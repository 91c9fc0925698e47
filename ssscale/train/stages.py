"""The plan of a run: which stage, batch size, length and rows each of its steps has. A pure function of the configuration.

A step belongs to the stage in which it ends, and the last step of the run may end beyond the last stage. Where a stage or
a batch warmup changes the size of a step, the tokens before it must be whole steps.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from ssscale.config.load import changed_model
from ssscale.config.schema import Config, ModelConfig, StageConfig
from ssscale.errors import UserError

CHANGEABLE = {
    "mixers",
    "mixer",
    "position",
}  # keys of `model` that leave its weights as they are, or say how they begin


@dataclass(frozen=True)
class Part:
    """Steps of one stage and one batch size, one behind the other.

    first_sample counts rows of the stage's data folder that the parts before it take from there.
    """

    stage: int
    batch_size: int
    length: int
    first_step: int  # steps before it
    num_steps: int
    first_sample: int

    @property
    def tokens_per_step(self) -> int:
        return self.batch_size * self.length

    @property
    def last_step(self) -> int:
        return self.first_step + self.num_steps


def begun_model(before: ModelConfig, after: ModelConfig, length: int) -> ModelConfig:
    """`after` with options for the mixers that begin from others of `before`, trained on rows of `length`: `Mixer.begun`."""
    pairs = zip(before.layer_mixers, after.layer_mixers, strict=True)
    begun = {new.name: new.begun(after, length) for old, new in pairs if new.begins_from == old.name != new.name}
    return replace(after, mixer=replace(after.mixer, **begun))


def stage_config(config: Config, index: int) -> Config:
    """The configuration as stage `index` trains it: a stage's changes hold from it on."""
    model, data, train = config.model, config.data, config.train
    for number, stage in enumerate(train.stages[: index + 1]):
        if stage.model is not None:
            key = f"train.stages.{number}.model"
            for name in stage.model.keys() - CHANGEABLE:
                raise UserError(
                    f"{key}.{name}: a stage can change mixers, their options and position, not the model's sizes"
                )
            new = changed_model(model, stage.model, key)
            # What the stage says itself goes before what a mixer begins with.
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
    """The parts of a run in order. Raises UserError where a stage's tokens are not whole steps and have to be."""

    def __init__(self, config: Config) -> None:
        self.configs = [stage_config(config, index) for index in range(len(config.train.stages))]
        self.models = [own.model for own in self.configs]
        self.parts: list[Part] = []
        step = tokens = end = 0
        before = True  # whether the steps so far are their stages' tokens exactly
        taken: dict[str, int] = {}  # rows by data folder
        for index, stage in enumerate(config.train.stages):
            own = self.configs[index]
            end += stage.tokens
            for size, count, whole in self._sizes(own, stage, index, end - tokens):
                part = Part(index, size, own.data.length, step, count, taken.get(own.data.path, 0))
                if self.parts and self.parts[-1].tokens_per_step != part.tokens_per_step:
                    self._check_whole(before, stage, index)
                before = whole
                self.parts += [part] if count else []
                step, tokens = step + count, tokens + count * part.tokens_per_step
                taken[own.data.path] = part.first_sample + count * size
        self.total_steps = step if config.train.max_steps is None else min(step, config.train.max_steps)

    def _sizes(self, own: Config, stage: StageConfig, index: int, tokens: int) -> list[tuple[int, int, bool]]:
        """(batch size, steps, whether these steps are the tokens exactly) of a stage that has `tokens` left to train."""
        sizes = []
        for warmup in stage.batch_warmup:
            count, rest = divmod(warmup.tokens, warmup.batch_size * own.data.length)
            if rest or not count:
                size = warmup.batch_size * own.data.length
                raise UserError(
                    f"train.stages.{index}.batch_warmup: {warmup.tokens:,} tokens are no whole number of steps of "
                    f"{size:,} tokens: use {count * size or size:,} or {(count + 1) * size:,}"
                )
            sizes.append((warmup.batch_size, count, True))
            tokens -= warmup.tokens
        count, rest = divmod(tokens, own.tokens_per_step)
        last = index == len(self.configs) - 1
        return [*sizes, (own.train.batch_size, count + (last and rest > 0), rest == 0)]

    def _check_whole(self, whole: bool, stage: StageConfig, index: int) -> None:
        if whole:
            return
        before, size = self.configs[index - 1], self.configs[index - 1].tokens_per_step
        tokens = before.train.stages[index - 1].tokens
        raise UserError(
            f"train.stages do not add up: stage {stage.name!r} changes the size of a step, but the stage before it ends "
            f"within a step of {size:,} tokens: use train.stages.{index - 1}.tokens={tokens // size * size} or "
            f"{-(-tokens // size) * size}"
        )

    def at(self, step: int) -> Part:
        """The part that the step after `step` steps belongs to; the last part at the end of the run."""
        return next((part for part in self.parts if step < part.last_step), self.parts[-1])

    @cached_property
    def total_tokens(self) -> int:
        """Tokens that the steps train, a last step beyond the budget included, `max_steps` not."""
        return sum(part.num_steps * part.tokens_per_step for part in self.parts)

    def tokens(self, step: int) -> int:
        """Tokens trained after `step` steps."""
        return sum(max(0, min(step - part.first_step, part.num_steps)) * part.tokens_per_step for part in self.parts)

    def mixes(self, path: str, skipped: Sequence[tuple[int, int]] = ()) -> list[tuple[int, dict[str, float] | None]]:
        """(first row, mix) of each stage that reads the data folder. skipped: (step, rows passed over after it)."""
        found: dict[int, tuple[int, dict[str, float] | None]] = {}
        for part in self.parts:
            own = self.configs[part.stage]
            if own.data.path == path and part.stage not in found:
                first = part.first_sample + self._passed(path, skipped, part.first_step)
                found[part.stage] = (first, own.train.stages[part.stage].mix)
        return list(found.values())

    def rows_between(self, first: int, last: int) -> int:
        """Rows that the steps after `first` up to `last` read of the data folder in use at `first`."""
        path = self.configs[self.at(first).stage].data.path
        parts = (part for part in self.parts if self.configs[part.stage].data.path == path)
        return sum(max(0, min(last, part.last_step) - max(first, part.first_step)) * part.batch_size for part in parts)

    def next_sample(self, step: int, skipped: Sequence[tuple[int, int]] = ()) -> int:
        """The row of its data folder with which the step after `step` steps begins."""
        part = self.at(step)
        path = self.configs[part.stage].data.path
        return part.first_sample + (step - part.first_step) * part.batch_size + self._passed(path, skipped, step + 1)

    def _passed(self, path: str, skipped: Sequence[tuple[int, int]], before: int) -> int:
        """Rows of a data folder that were passed over ahead of step `before`."""
        here = (rows for at, rows in skipped if at < before and self.configs[self.at(at).stage].data.path == path)
        return sum(here)
