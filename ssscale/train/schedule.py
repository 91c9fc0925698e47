"""The learning rate as a pure function of tokens.

One convention, everywhere: `tokens` counts what the run has trained when the step *ends*, so the first step of a warmup
of W steps runs at 1/W of the peak, step W at the peak, and the last step of a decay at its floor. A step belongs to the
stage in which it ends; the last step of a run may end beyond the last stage and counts as its end.
"""

from collections.abc import Sequence

from ssscale.config.registry import SCHEDULES
from ssscale.config.schema import StageConfig
from ssscale.train.schedules.base import Stretch


def learning_rate(stages: Sequence[StageConfig], batch_size: int, tokens: int) -> float:
    """The learning rate of the step that ends at `tokens` of the whole run; `batch_size` in rows, for `power`."""
    index, into = stage_at(stages, tokens)
    return stage_learning_rate(stages, batch_size, index, into)


def stage_at(stages: Sequence[StageConfig], tokens: int) -> tuple[int, int]:
    """(index of the stage, tokens into it) of the step that ends at `tokens`."""
    into = tokens
    for index, stage in enumerate(stages):
        if into <= stage.tokens:
            return index, into
        into -= stage.tokens
    return len(stages) - 1, stages[-1].tokens


def total_tokens(stages: Sequence[StageConfig]) -> int:
    return sum(stage.tokens for stage in stages)


def batch_rows(stages: Sequence[StageConfig], batch_size: int, index: int) -> int:
    """Rows a step in stage `index` of a run that begins with `batch_size`."""
    return next((stage.batch_size for stage in reversed(stages[: index + 1]) if stage.batch_size), batch_size)


def stage_learning_rate(stages: Sequence[StageConfig], batch_size: int, index: int, into: int) -> float:
    """The learning rate `into` tokens of stage `index` (0 ≤ into ≤ its tokens); ssscale/train/schedules has the formulas."""
    stage = stages[index]
    config, schedule = stage.schedule, SCHEDULES[stage.schedule.kind]()
    before = None
    if schedule.follows and index:
        before = stage_learning_rate(stages, batch_size, index - 1, stages[index - 1].tokens)
    warmed = max(into, config.warmup_tokens)
    at = Stretch(total_tokens(stages[:index]), warmed, stage.tokens, batch_rows(stages, batch_size, index), before)
    rate: float = schedule.rate(config, at)
    return rate * into / config.warmup_tokens if into < config.warmup_tokens else rate
