"""The learning rate as a pure function of tokens.

Everywhere, `tokens` is the number of tokens that the run has trained when the step *ends*. So the first step of a warmup of
W steps runs at 1/W of the peak, step W runs at the peak, and the last step of a decay runs at its floor. A step belongs to
the stage in which it ends. If the last step of a run ends beyond the last stage, it counts as the end of that stage.
"""

from collections.abc import Sequence

from ssscale.config.registry import SCHEDULES
from ssscale.config.schema import StageConfig
from ssscale.train.schedules.base import Stretch


def learning_rate(stages: Sequence[StageConfig], batch_size: int, tokens: int) -> float:
    """Returns the learning rate of the step that ends at `tokens` of the run.

    batch_size: rows per step in stages before the first that sets a `batch_size`. `power` uses the rows of its stage.
    """
    index, into = stage_at(stages, tokens)
    return stage_learning_rate(stages, batch_size, index, into)


def stage_at(stages: Sequence[StageConfig], tokens: int) -> tuple[int, int]:
    """Returns (index of the stage, tokens since its beginning) for the step that ends at `tokens` of the run."""
    into = tokens
    for index, stage in enumerate(stages):
        if into <= stage.tokens:
            return index, into
        into -= stage.tokens
    return len(stages) - 1, stages[-1].tokens


def total_tokens(stages: Sequence[StageConfig]) -> int:
    return sum(stage.tokens for stage in stages)


def batch_rows(stages: Sequence[StageConfig], batch_size: int, index: int) -> int:
    """Returns the rows per step in stage `index` of a run that begins with `batch_size`, without batch warmups."""
    return next((stage.batch_size for stage in reversed(stages[: index + 1]) if stage.batch_size), batch_size)


def stage_learning_rate(stages: Sequence[StageConfig], batch_size: int, index: int, into: int) -> float:
    """Returns the learning rate after `into` tokens of stage `index`, 0 ≤ into ≤ stage.tokens.

    ssscale/train/schedules has the formulas. The warmup is linear from 0.
    """
    stage = stages[index]
    config, schedule = stage.schedule, SCHEDULES[stage.schedule.kind]()
    before = None
    if schedule.follows and index:
        before = stage_learning_rate(stages, batch_size, index - 1, stages[index - 1].tokens)
    warmed = max(into, config.warmup_tokens)
    at = Stretch(total_tokens(stages[:index]), warmed, stage.tokens, batch_rows(stages, batch_size, index), before)
    rate: float = schedule.rate(config, at)
    return rate * into / config.warmup_tokens if into < config.warmup_tokens else rate
