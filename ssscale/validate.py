"""Combinations that cannot run, each with a sentence that says what would. `ssscale.config` has checked the types."""

import operator
import unicodedata
from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from enum import Enum
from typing import Any

from ssscale.config.schema import (
    POSITIONS,
    WINDOWS,
    Auto,
    Config,
    Core,
    ModelConfig,
    PositionMethod,
    RopeScaling,
    ScheduleKind,
    SSMaxVariant,
    StageConfig,
)
from ssscale.errors import UserError
from ssscale.train.microbatch import with_microbatch
from ssscale.train.stages import Plan, stage_config
from ssscale.validate_parallel import alternatives, check_parallel, check_world, near_divisors


def validate(config: Config, world_size: int | None = None, gpu: bool = False) -> None:
    """Raise UserError, one sentence, for the first thing in `config` that cannot run.

    world_size: processes of the run; None leaves out what depends on it. gpu: what `precision=auto` stands for.
    """
    _check_leaves(config, "")
    _check_numbers(config)
    if world_size is not None and world_size >= 2**31:
        raise UserError("more than 2^31 processes: no machine has so many")
    _check_model(config.model)
    _check_attention(config.model)
    _check_position(config.model, gpu)
    if bool(config.train.tasks) != bool(config.train.task_every):
        raise UserError(
            f"train.tasks={config.train.tasks} and train.task_every={config.train.task_every} go together: name tasks and "
            "how often they are evaluated, or neither"
        )
    names = [stage.name for stage in config.train.stages]
    if not names:
        raise UserError("train.stages is empty: a run needs at least one stage")
    for index, stage in enumerate(config.train.stages):
        if stage.name in names[:index]:
            raise UserError(f"train.stages.{index}.name: two stages are called {stage.name!r}; give each its own name")
        own = stage_config(config, index)
        _check_stage(stage, f"train.stages.{index}", index, own.tokens_per_step)
        _check_change(config, own, stage, index)
        check_parallel(own, gpu)
        if world_size is not None:
            for rows in [own.train.batch_size, *(warmup.batch_size for warmup in stage.batch_warmup)]:
                check_world(replace(own, train=replace(own.train, batch_size=rows)), world_size)
                with_microbatch(own, rows, world_size)
    Plan(config)


Bound = tuple[str, Callable[[Any, Any], bool], float]

AT_LEAST_1: Bound = ("at least 1", operator.ge, 1)
AT_LEAST_0: Bound = ("0 or more", operator.ge, 0)
ABOVE_0: Bound = ("greater than 0", operator.gt, 0)
BELOW_0: Bound = ("less than 0", operator.lt, 0)
BELOW_1: Bound = ("less than 1", operator.lt, 1)
# Beyond these nothing is meant, and what counts in 64 or 32 bits fails.
SIZE: Bound = ("less than 2^31", operator.lt, 2**31)
AT_MOST_1024: Bound = ("at most 1024", operator.le, 1024)
A_YEAR: Bound = ("at most 31,536,000 seconds, a year", operator.le, 31_536_000)

BOUNDS: dict[str, tuple[Bound, ...]] = {
    "model.num_layers": (AT_LEAST_1, ("at most 10,000", operator.le, 10_000)),
    "model.hidden_size": (AT_LEAST_1, SIZE),
    "model.ffn_hidden_size": (AT_LEAST_1, SIZE),
    "model.num_heads": (AT_LEAST_1, SIZE),
    "model.num_kv_heads": (AT_LEAST_1, SIZE),
    "model.head_dim": (AT_LEAST_1, SIZE),
    "model.vocab_size": (AT_LEAST_1, SIZE),
    "model.norm_eps": (ABOVE_0,),
    "model.init_std": (ABOVE_0,),
    "model.attention.ssmax_scale": (ABOVE_0,),
    "model.attention.skip_below": (AT_LEAST_0, BELOW_1),
    "model.position.rope_base": (ABOVE_0,),
    "model.position.rope_factor": (ABOVE_0,),
    "model.position.train_length": (AT_LEAST_1, SIZE),
    "model.position.window": (AT_LEAST_1, SIZE),
    "model.width.base_hidden_size": (AT_LEAST_1, SIZE),
    "model.width.embedding_multiplier": (ABOVE_0,),
    "model.width.residual_multiplier": (ABOVE_0,),
    "model.width.logits_divisor": (ABOVE_0,),
    "model.width.matrix_lr_divisor": (ABOVE_0,),
    "model.width.matrix_init_divisor": (ABOVE_0,),
    "model.width.attention_scale": (ABOVE_0,),
    "data.length": (("at least 2", operator.ge, 2), SIZE),
    "data.num_workers": (AT_LEAST_0, AT_MOST_1024),
    "data.prefetch": (AT_LEAST_1, AT_MOST_1024),
    "data.timeout": (ABOVE_0, A_YEAR),
    "data.cache_gb": (ABOVE_0, ("less than 10^9", operator.lt, 1e9)),
    "optimizer.betas": (AT_LEAST_0, BELOW_1),
    "optimizer.eps": (ABOVE_0,),
    "optimizer.weight_decay": (AT_LEAST_0,),
    "optimizer.vector_lr_multiplier": (AT_LEAST_0,),
    "optimizer.clip": (AT_LEAST_0,),
    "train.batch_size": (AT_LEAST_1, SIZE),
    "train.microbatch": (AT_LEAST_1, SIZE),
    "train.max_steps": (AT_LEAST_0,),
    "train.seed": (AT_LEAST_0,),
    "train.log_every": (AT_LEAST_1,),
    "train.eval_every": (AT_LEAST_0,),
    "train.eval_rows": (AT_LEAST_1,),
    "train.task_every": (AT_LEAST_0,),
    "train.task_limit": (AT_LEAST_1,),
    "train.save_every": (AT_LEAST_0,),
    "train.observe_every": (AT_LEAST_0,),
    "train.profile": (AT_LEAST_1,),
    "train.max_skipped": (AT_LEAST_1,),
    "train.spike_z": (AT_LEAST_0,),
    "train.watchdog": (AT_LEAST_0, A_YEAR),
    "train.guard_every": (AT_LEAST_0,),
    "train.keep": (AT_LEAST_1, SIZE),
    "train.keep_every": (AT_LEAST_0,),
    "parallel.tensor": (AT_LEAST_1, SIZE),
    "parallel.ulysses": (AT_LEAST_1, SIZE),
    "parallel.ring": (AT_LEAST_1, SIZE),
    "parallel.zero_stage": (AT_LEAST_0, ("at most 3", operator.le, 3)),
}

STAGE_BOUNDS: dict[str, tuple[Bound, ...]] = {
    "tokens": (AT_LEAST_1,),
    "schedule.lr": (ABOVE_0,),
    "schedule.warmup_tokens": (AT_LEAST_0,),
    "schedule.decay_tokens": (AT_LEAST_0,),
    "schedule.floor": (AT_LEAST_0, BELOW_1),
    "schedule.power_a": (ABOVE_0,),
    "schedule.power_b": (BELOW_0,),
    "ssmax_scale": (ABOVE_0,),
    "rope_base": (ABOVE_0,),
    "length": (("at least 2", operator.ge, 2), SIZE),
    "batch_size": (AT_LEAST_1, SIZE),
    "microbatch": (AT_LEAST_1, SIZE),
}

WARMUP_BOUNDS: dict[str, tuple[Bound, ...]] = {"batch_size": (AT_LEAST_1, SIZE), "tokens": (AT_LEAST_1,)}


def _check_leaves(value: Any, key: str) -> None:
    """What holds for every key: counts fit 64 bits, and texts can be printed, written to config.yaml and opened."""
    if is_dataclass(value):
        for entry in fields(value):
            _check_leaves(getattr(value, entry.name), f"{key}.{entry.name}".removeprefix("."))
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            _check_leaves(item, f"{key}.{index}")
    elif isinstance(value, dict):
        for name, item in value.items():
            _check_leaves(name, key)
            _check_leaves(item, f"{key}.{name}")
    elif type(value) is int and not -(2**63) <= value < 2**63:
        raise UserError(f"{key} must be less than 2^63, not a number of {len(f'{value:x}') * 4} bits")
    elif isinstance(value, str) and not isinstance(value, Enum):
        if any(unicodedata.category(character) in ("Cc", "Cs") for character in value):
            raise UserError(f"{key} has a character that no file can be named with: {value!r}")
        if "${" in value:
            raise UserError(f"{key} must not contain '${{', which stands for another key's value: {value!r}")


def _check_numbers(config: Config) -> None:
    _check_bounds(config, "", BOUNDS)
    for index, stage in enumerate(config.train.stages):
        _check_bounds(stage, f"train.stages.{index}.", STAGE_BOUNDS)
        for number, warmup in enumerate(stage.batch_warmup):
            _check_bounds(warmup, f"train.stages.{index}.batch_warmup.{number}.", WARMUP_BOUNDS)
        if stage.mix is not None and not stage.mix:
            raise UserError(
                f"train.stages.{index}.mix is empty: name sources, or null takes all of them by their sizes"
            )
        for source, share in (stage.mix or {}).items():
            if share <= 0:
                raise UserError(
                    f"train.stages.{index}.mix.{source} must be greater than 0, not {share:g}; leave it out"
                )


def _check_bounds(section: Any, prefix: str, bounds: dict[str, tuple[Bound, ...]]) -> None:
    for key, wanted in bounds.items():
        value = operator.attrgetter(key)(section)
        for number in value if isinstance(value, tuple) else (value,):
            if isinstance(number, Auto):
                continue
            for words, holds, limit in wanted:
                if number is not None and not holds(number, limit):
                    raise UserError(f"{prefix}{key} must be {words}, not {number}")


def _check_model(model: ModelConfig) -> None:
    heads, kv_heads = model.num_heads, model.kv_heads
    if model.head_dim is None and model.hidden_size % heads:
        raise UserError(
            f"model.num_heads={heads} does not divide model.hidden_size={model.hidden_size}: "
            f"use {near_divisors(model.hidden_size, heads)} heads, or set model.head_dim"
        )
    if heads % kv_heads:
        raise UserError(
            f"model.num_kv_heads={kv_heads} does not divide model.num_heads={heads}: "
            f"use {near_divisors(heads, kv_heads)} key/value heads"
        )
    if model.position.method is PositionMethod.rope and model.head_size % 2:
        raise UserError(
            f"rope rotates pairs, but a head has {model.head_size} dimensions: "
            "set an even model.head_dim, or model.position.method=nope"
        )


def _check_attention(model: ModelConfig) -> None:
    attention = model.attention
    if attention.core is not Core.ssmax and attention.ssmax is not SSMaxVariant.learned:
        raise UserError(
            f"model.attention.ssmax={attention.ssmax.value} needs model.attention.core=ssmax, "
            f"not {attention.core.value}"
        )
    if attention.ssmax in (SSMaxVariant.learned, SSMaxVariant.fixed) and attention.ssmax_bias:
        raise UserError(
            f"model.attention.ssmax_bias={attention.ssmax_bias:g} has no effect under ssmax={attention.ssmax.value}: "
            "set model.attention.ssmax=bias"
        )
    if attention.core is not Core.stickbreaking and attention.remainder:
        raise UserError(
            "model.attention.remainder=true is stick-breaking's unspent stick: it needs "
            f"model.attention.core=stickbreaking, not {attention.core.value}"
        )


def _check_position(model: ModelConfig, gpu: bool = False) -> None:
    core, position = model.attention.core, model.position
    allowed = POSITIONS[core]
    if position.method not in allowed:
        raise UserError(
            f"model.position.method={position.method.value} does not go with model.attention.core={core.value}: "
            f"use {alternatives(sorted(method.value for method in allowed))}; {_REASONS[core]}"
        )
    if position.window is not None and core not in WINDOWS:
        raise UserError(
            f"model.position.window={position.window} does not go with model.attention.core={core.value}, which spends its "
            "stick on the nearest keys anyway: set model.position.window=null"
        )
    if gpu and position.method in (PositionMethod.alibi, PositionMethod.fire) and model.head_size < 16:
        raise UserError(
            f"model.position.method={position.method.value} runs in FlexAttention on a GPU, which takes no heads of "
            f"{model.head_size} dimensions: use at least 16"
        )
    scaling, factor = position.rope_scaling, position.rope_factor
    if scaling is not RopeScaling.none and position.method is not PositionMethod.rope:
        raise UserError(
            f"model.position.rope_scaling={scaling.value} needs model.position.method=rope, not {position.method.value}"
        )
    if scaling in (RopeScaling.ntk, RopeScaling.dynamic_ntk) and model.head_size < 4:
        raise UserError(
            f"model.position.rope_scaling={scaling.value} stretches all but the fastest pair of dimensions, and a head of "
            f"{model.head_size} has no other: use linear"
        )
    if scaling is RopeScaling.none and factor != 1.0:
        raise UserError(
            f"model.position.rope_factor={factor:g} has no effect under rope_scaling=none: "
            "set model.position.rope_scaling=linear, ntk or dynamic_ntk"
        )
    if scaling in (RopeScaling.linear, RopeScaling.ntk) and factor == 1.0:
        raise UserError(
            f"model.position.rope_scaling={scaling.value} with rope_factor=1 changes nothing: set model.position.rope_factor"
        )
    if scaling is RopeScaling.dynamic_ntk and position.train_length is None:
        raise UserError(
            "model.position.rope_scaling=dynamic_ntk stretches what is longer than the training length, which it does not "
            "have: set model.position.train_length to the row length of the training"
        )


_REASONS = {
    Core.ssmax: "SSMax scales q, and would miss a bias that is added behind q·k",
    Core.stickbreaking: "it takes the nearest keys first, which tells positions apart",
}


def _check_stage(stage: StageConfig, key: str, index: int, tokens_per_step: int) -> None:
    schedule, kind = stage.schedule, stage.schedule.kind
    if stage.tokens < tokens_per_step:
        raise UserError(
            f"{key}.tokens={stage.tokens:,} is less than one step, which trains {tokens_per_step:,} tokens "
            "(train.batch_size × data.length)"
        )
    if kind is ScheduleKind.decay and index == 0:
        raise UserError(
            f"{key}.schedule.kind=decay starts from the learning rate of the stage before, and the first stage has "
            "none: put a stage before it, or use wsd, power or cosine"
        )
    if kind is ScheduleKind.decay and (schedule.warmup_tokens or schedule.decay_tokens):
        raise UserError(
            f"{key}.schedule: a decay stage falls over all its tokens; set warmup_tokens and decay_tokens to 0"
        )
    if kind in (ScheduleKind.constant, ScheduleKind.cosine) and schedule.decay_tokens:
        raise UserError(
            f"{key}.schedule.decay_tokens has no effect under {kind.value}: use wsd or power, or set it to 0"
        )
    if schedule.warmup_tokens + schedule.decay_tokens > stage.tokens:
        raise UserError(
            f"{key}: warmup_tokens ({schedule.warmup_tokens:,}) and decay_tokens ({schedule.decay_tokens:,}) together "
            f"are more than the stage's {stage.tokens:,} tokens"
        )


def _check_change(config: Config, own: Config, stage: StageConfig, index: int) -> None:
    """What a stage changes, against the stage before it."""
    before = stage_config(config, index - 1) if index else config
    key = f"train.stages.{index}"
    if stage.core not in (None, before.model.attention.core) and (
        (before.model.attention.core, stage.core) != (Core.softmax, Core.ssmax)
    ):
        raise UserError(
            f"{key}.core={stage.core.value if stage.core else ''}: a run can change from softmax to ssmax only, "
            f"not from {before.model.attention.core.value}"
        )
    if stage.length not in (None, before.data.length) and own.data.path == before.data.path:
        raise UserError(
            f"{key}.length={stage.length} needs data packed to it: give {key}.data_path, as {own.data.path} has rows of "
            f"{before.data.length} tokens"
        )
    _check_model(own.model)
    _check_attention(own.model)
    _check_position(own.model)
