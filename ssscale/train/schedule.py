"""The learning rate as a pure function of tokens.

One convention, everywhere: `tokens` counts what the run has trained when the step *ends*, so the first step of a warmup
of W steps runs at 1/W of the peak, step W at the peak, and the last step of a decay at its floor. A step belongs to the
stage in which it ends; the last step of a run may end beyond the last stage and counts as its end.
"""

import math
from collections.abc import Sequence

from ssscale.config.schema import DecayShape, ScheduleConfig, ScheduleKind, StageConfig


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
    """The learning rate `into` tokens of stage `index` (0 ≤ into ≤ its tokens); see the functions for the formulas."""
    stage = stages[index]
    schedule = stage.schedule
    start = total_tokens(stages[:index])
    if schedule.kind is ScheduleKind.decay:
        assert index > 0, "validate() refuses a first stage that decays"
        before = stage_learning_rate(stages, batch_size, index - 1, stages[index - 1].tokens)
        return before * decay_factor(schedule.decay_shape, into / stage.tokens, schedule.floor)
    rows = batch_rows(stages, batch_size, index)
    if into < schedule.warmup_tokens:
        peak = _after_warmup(schedule, rows, start, schedule.warmup_tokens, stage.tokens)
        return peak * into / schedule.warmup_tokens
    return _after_warmup(schedule, rows, start, into, stage.tokens)


def _after_warmup(schedule: ScheduleConfig, batch_size: int, start: int, into: int, length: int) -> float:
    if schedule.kind is ScheduleKind.constant:
        return schedule.lr
    if schedule.kind is ScheduleKind.cosine:
        rest = length - schedule.warmup_tokens
        return schedule.lr * cosine_factor((into - schedule.warmup_tokens) / rest if rest else 0.0, schedule.floor)
    decay_start = length - schedule.decay_tokens
    held = min(into, decay_start)
    if schedule.kind is ScheduleKind.power:
        lr = power_learning_rate(start + held, batch_size, schedule.lr, schedule.power_a, schedule.power_b)
    else:
        assert schedule.kind is ScheduleKind.wsd, schedule.kind
        lr = schedule.lr
    if into <= decay_start:
        return lr
    return lr * decay_factor(schedule.decay_shape, (into - decay_start) / schedule.decay_tokens, schedule.floor)


def power_learning_rate(tokens: int, batch_size: int, cap: float, a: float, b: float) -> float:
    """η(n) = min(η_max, β·a·n^b) with n tokens of the whole run and β rows a batch   (Power, arXiv:2408.13359).

    Its warmup is linear to η(N_w); its decay phase, the last N_d tokens, multiplies η(N−N_d) by `decay_factor`.
    """
    return cap if tokens <= 0 else min(cap, batch_size * a * float(tokens) ** b)


def cosine_factor(x: float, floor: float) -> float:
    """f + (1−f)·(1 + cos πx)/2, x from 0 at the end of the warmup to 1 at the end of the stage   (arXiv:1608.03983)."""
    return floor + (1 - floor) * (1 + math.cos(math.pi * x)) / 2


def decay_factor(shape: DecayShape, x: float, floor: float) -> float:
    """From 1 at x = 0 to exactly `floor` f at x = 1: the decay of WSD (MiniCPM, arXiv:2404.06395), Power and stage 2.

    exponential: e/(e−1)·(1−f)·exp(−x) + (f·e−1)/(e−1)
    linear:      1 − (1−f)·x
    sqrt:        1 − (1−f)·√x   (1−sqrt, arXiv:2405.18392)
    """
    # The ends are returned as they are: rounding would leave 1e-17 instead of a floor of 0.
    if x <= 0:
        return 1.0
    if x >= 1:
        return floor
    if shape is DecayShape.exponential:
        return math.e / (math.e - 1) * (1 - floor) * math.exp(-x) + (floor * math.e - 1) / (math.e - 1)
    return 1 - (1 - floor) * (x if shape is DecayShape.linear else math.sqrt(x))
