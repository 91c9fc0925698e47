"""Refuses schedules and lengths of stages that cannot be trained, and says what would."""

from dataclasses import fields
from enum import Enum
from typing import Any

from ssscale.config.registry import IN_PLUGIN, SCHEDULES
from ssscale.config.schema import ScheduleConfig, StageConfig
from ssscale.errors import UserError
from ssscale.validate_parallel import alternatives

SHAPES = ("decay_shape", "floor", "power_a", "power_b")  # options that only some schedules read


def shown(value: Any) -> str:
    """Returns a value as run files write it."""
    return str(value.value if isinstance(value, Enum) else value).lower()


def check_stage(stage: StageConfig, key: str, index: int, tokens_per_step: int) -> None:
    schedule = stage.schedule
    if schedule.kind not in SCHEDULES:
        raise UserError(
            f"{key}.schedule.kind must be one of {', '.join(SCHEDULES)}, not {schedule.kind!r}, {IN_PLUGIN}"
        )
    kind = SCHEDULES[schedule.kind]
    if stage.tokens < tokens_per_step:
        raise UserError(
            f"{key}.tokens={stage.tokens:,} is less than one step, which trains {tokens_per_step:,} tokens "
            "(train.batch_size × data.length)"
        )
    if kind.follows and index == 0:
        raise UserError(
            f"{key}.schedule.kind={kind.name} starts from the learning rate of the stage before, and the first stage has "
            "none: put a stage before it, or use wsd, power or cosine"
        )
    if kind.follows and (schedule.warmup_tokens or schedule.decay_tokens):
        raise UserError(
            f"{key}.schedule: a {kind.name} stage lowers the rate over all its tokens; set warmup_tokens and decay_tokens to 0"
        )
    if not kind.decays and schedule.decay_tokens:
        decaying = [name for name, other in SCHEDULES.items() if other.decays]
        raise UserError(
            f"{key}.schedule.decay_tokens has no effect under {kind.name}: use {alternatives(decaying)}, or set it to 0"
        )
    if schedule.warmup_tokens + schedule.decay_tokens > stage.tokens:
        raise UserError(
            f"{key}: warmup_tokens ({schedule.warmup_tokens:,}) and decay_tokens ({schedule.decay_tokens:,}) together "
            f"are more than the stage's {stage.tokens:,} tokens"
        )
    _check_shape(schedule, f"{key}.schedule")
    kind().check(schedule, f"{key}.schedule")


def _check_shape(schedule: ScheduleConfig, key: str) -> None:
    """Raises UserError for options of other schedules, because the user expects them to have an effect."""
    kind = SCHEDULES[schedule.kind]
    # A stage that follows begins at the rate of the stage before.
    optional = (*SHAPES, "lr") if kind.follows else SHAPES
    for option in fields(schedule):
        value = getattr(schedule, option.name)
        if kind.reads is None or option.name not in optional or option.name in kind.reads or value == option.default:
            continue
        raise UserError(
            f"{key}.{option.name}={shown(value)} has no effect under {schedule.kind}: set it to its default, "
            f"{shown(option.default)}"
        )
