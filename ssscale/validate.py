"""Combinations that cannot run, each with a sentence that says what would. `ssscale.config` has checked the types."""

import math
import operator
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from ssscale.errors import UserError
from ssscale.schema import (
    POSITIONS,
    WINDOWS,
    Compile,
    Config,
    Core,
    ModelConfig,
    PositionMethod,
    Precision,
    RopeScaling,
    ScheduleKind,
    SSMaxVariant,
    StageConfig,
    TrainConfig,
)
from ssscale.train.stages import Plan, stage_config


def validate(config: Config, world_size: int | None = None, gpu: bool = False) -> None:
    """Raise UserError, one sentence, for the first thing in `config` that cannot run.

    world_size: processes of the run; None leaves out what depends on it. gpu: what `precision=auto` stands for.
    """
    _check_numbers(config)
    _check_model(config.model)
    _check_attention(config.model)
    _check_position(config.model, gpu)
    names = [stage.name for stage in config.train.stages]
    if not names:
        raise UserError("train.stages is empty: a run needs at least one stage")
    for index, stage in enumerate(config.train.stages):
        if stage.name in names[:index]:
            raise UserError(f"train.stages.{index}.name: two stages are called {stage.name!r}; give each its own name")
        own = stage_config(config, index)
        _check_stage(stage, f"train.stages.{index}", index, own.tokens_per_step)
        _check_change(config, own, stage, index)
        _check_parallel(own, gpu)
        if world_size is not None:
            for rows in [own.train.batch_size, *(warmup.batch_size for warmup in stage.batch_warmup)]:
                _check_world(replace(own, train=replace(own.train, batch_size=rows)), world_size)
    Plan(config)


Bound = tuple[str, Callable[[Any, Any], bool], float]

AT_LEAST_1: Bound = ("at least 1", operator.ge, 1)
AT_LEAST_0: Bound = ("0 or more", operator.ge, 0)
ABOVE_0: Bound = ("greater than 0", operator.gt, 0)
BELOW_0: Bound = ("less than 0", operator.lt, 0)
BELOW_1: Bound = ("less than 1", operator.lt, 1)

BOUNDS: dict[str, tuple[Bound, ...]] = {
    "model.num_layers": (AT_LEAST_1,),
    "model.hidden_size": (AT_LEAST_1,),
    "model.ffn_hidden_size": (AT_LEAST_1,),
    "model.num_heads": (AT_LEAST_1,),
    "model.num_kv_heads": (AT_LEAST_1,),
    "model.head_dim": (AT_LEAST_1,),
    "model.vocab_size": (AT_LEAST_1,),
    "model.norm_eps": (ABOVE_0,),
    "model.init_std": (ABOVE_0,),
    "model.attention.ssmax_scale": (ABOVE_0,),
    "model.attention.skip_below": (AT_LEAST_0, BELOW_1),
    "model.position.rope_base": (ABOVE_0,),
    "model.position.rope_factor": (ABOVE_0,),
    "model.position.train_length": (AT_LEAST_1,),
    "model.position.window": (AT_LEAST_1,),
    "model.width.embedding_multiplier": (ABOVE_0,),
    "model.width.residual_multiplier": (ABOVE_0,),
    "model.width.logits_divisor": (ABOVE_0,),
    "model.width.matrix_lr_divisor": (ABOVE_0,),
    "model.width.attention_scale": (ABOVE_0,),
    "data.length": (("at least 2", operator.ge, 2),),
    "data.num_workers": (AT_LEAST_0,),
    "data.prefetch": (AT_LEAST_1,),
    "data.timeout": (ABOVE_0,),
    "data.cache_gb": (ABOVE_0,),
    "optimizer.betas": (AT_LEAST_0, BELOW_1),
    "optimizer.eps": (ABOVE_0,),
    "optimizer.weight_decay": (AT_LEAST_0,),
    "optimizer.clip": (AT_LEAST_0,),
    "train.batch_size": (AT_LEAST_1,),
    "train.microbatch": (AT_LEAST_1,),
    "train.max_steps": (AT_LEAST_0,),
    "train.seed": (AT_LEAST_0,),
    "train.log_every": (AT_LEAST_1,),
    "train.eval_every": (AT_LEAST_0,),
    "train.eval_rows": (AT_LEAST_1,),
    "train.save_every": (AT_LEAST_0,),
    "train.observe_every": (AT_LEAST_0,),
    "train.profile": (AT_LEAST_1,),
    "train.max_skipped": (AT_LEAST_1,),
    "train.spike_z": (AT_LEAST_0,),
    "train.watchdog": (AT_LEAST_0,),
    "train.guard_every": (AT_LEAST_0,),
    "train.keep": (AT_LEAST_1,),
    "train.keep_every": (AT_LEAST_0,),
    "parallel.tensor": (AT_LEAST_1,),
    "parallel.ulysses": (AT_LEAST_1,),
    "parallel.ring": (AT_LEAST_1,),
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
    "length": (("at least 2", operator.ge, 2),),
    "batch_size": (AT_LEAST_1,),
    "microbatch": (AT_LEAST_1,),
}

WARMUP_BOUNDS: dict[str, tuple[Bound, ...]] = {"batch_size": (AT_LEAST_1,), "tokens": (AT_LEAST_1,)}


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
            for words, holds, limit in wanted:
                if number is not None and not holds(number, limit):
                    raise UserError(f"{prefix}{key} must be {words}, not {number}")


def _check_model(model: ModelConfig) -> None:
    heads, kv_heads = model.num_heads, model.kv_heads
    if model.head_dim is None and model.hidden_size % heads:
        raise UserError(
            f"model.num_heads={heads} does not divide model.hidden_size={model.hidden_size}: "
            f"use {_near_divisors(model.hidden_size, heads)} heads, or set model.head_dim"
        )
    if heads % kv_heads:
        raise UserError(
            f"model.num_kv_heads={kv_heads} does not divide model.num_heads={heads}: "
            f"use {_near_divisors(heads, kv_heads)} key/value heads"
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
            f"use {_alternatives(sorted(method.value for method in allowed))}; {_REASONS[core]}"
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


def _check_parallel(config: Config, gpu: bool) -> None:
    model, train, parallel = config.model, config.train, config.parallel
    tensor = parallel.tensor
    for key in ("num_heads", "kv_heads", "ffn_hidden_size"):
        size = getattr(model, key)
        if size % tensor:
            name = "num_kv_heads" if key == "kv_heads" else key
            raise UserError(
                f"parallel.tensor={tensor} does not divide model.{name}={size}: use {_near_divisors(size, tensor)}"
            )
    _check_context(config)
    tokens = train.microbatch * config.data.length // parallel.context
    if tensor > 1 and parallel.sequence and tokens % tensor:
        share = f", of which a context rank has {tokens}," if parallel.context > 1 else ""
        raise UserError(
            f"parallel.sequence splits a microbatch of {train.microbatch} × {config.data.length} tokens{share} over "
            f"parallel.tensor={tensor} ranks, which does not divide it: set parallel.sequence=false or another "
            "train.microbatch"
        )
    if tensor > 1 and train.compile is Compile.model:
        raise UserError(
            f"train.compile=model needs parallel.tensor=1, not {tensor}: tensor parallelism breaks the graph between "
            "blocks; use train.compile=block"
        )
    bf16 = train.precision is Precision.bf16 or (train.precision is Precision.auto and gpu)
    if parallel.zero_stage == 0 and bf16:
        raise UserError(
            "parallel.zero_stage=0 cannot train in bf16: DeepSpeed refuses to accumulate its gradients in fp32 and "
            "returns no gradient norm; use parallel.zero_stage=1 or train.precision=fp32"
        )


def _check_context(config: Config) -> None:
    model, parallel, length = config.model, config.parallel, config.data.length
    ulysses, ring, position = parallel.ulysses, parallel.ring, config.model.position
    if parallel.context == 1:
        return
    heads = model.kv_heads // parallel.tensor
    if heads % ulysses:
        each = f", {heads} on each of parallel.tensor={parallel.tensor} ranks" if parallel.tensor > 1 else ""
        raise UserError(
            f"parallel.ulysses={ulysses} does not divide the {model.kv_heads} key/value heads of the model{each}: use "
            f"parallel.ulysses={_near_divisors(heads, ulysses)}, and parallel.ring for further ranks"
        )
    if length % ulysses:
        raise UserError(
            f"parallel.ulysses={ulysses} does not divide the rows of data.length={length} tokens: use "
            f"{_near_divisors(math.gcd(length, heads), ulysses)}"
        )
    if ring > 1 and length % (2 * ring * ulysses):
        half = length // (2 * ulysses) if length % (2 * ulysses) == 0 else 1
        divides = f"use parallel.ring={_near_divisors(half, ring)}" if half > 1 else "use parallel.ring=1"
        raise UserError(
            f"parallel.ring={ring} divides each row into {2 * ring} chunks{_among(ulysses)}, and data.length={length} is no "
            f"multiple of {2 * ring * ulysses}: {divides}, or rows of another length"
        )
    if position.method in (PositionMethod.alibi, PositionMethod.fire):
        raise UserError(
            f"model.position.method={position.method.value} is a bias that every rank would need of all tokens: set "
            "parallel.ulysses=1 and parallel.ring=1"
        )
    if position.rope_scaling is RopeScaling.dynamic_ntk:
        raise UserError(
            "model.position.rope_scaling=dynamic_ntk depends on the whole document's length, of which a context rank has a "
            "part: set parallel.ulysses=1 and parallel.ring=1, or rope_scaling=ntk"
        )
    if position.window is not None and ring > 1:
        raise UserError(
            f"model.position.window={position.window} does not go with parallel.ring={ring}, which passes all keys round: "
            "use parallel.ulysses instead"
        )
    if config.train.compile is Compile.model:
        raise UserError(
            f"train.compile=model needs parallel.ulysses=1 and parallel.ring=1, not {ulysses} and {ring}: their "
            "communication breaks the graph in every block; use train.compile=none"
        )


def _among(ulysses: int) -> str:
    return f", shared by {ulysses} Ulysses ranks" if ulysses > 1 else ""


def _check_world(config: Config, world_size: int) -> None:
    train, tensor, context = config.train, config.parallel.tensor, config.parallel.context
    if world_size % tensor:
        raise UserError(
            f"parallel.tensor={tensor} does not divide the {world_size} processes of this run: "
            f"use {_near_divisors(world_size, tensor)}, or a multiple of {tensor} processes"
        )
    ranks = world_size // (tensor * context)
    if world_size % (tensor * context):
        each = f"parallel.ulysses={config.parallel.ulysses} × parallel.ring={config.parallel.ring}"
        raise UserError(
            f"{each} = {context} context ranks do not divide the {world_size // tensor} processes that "
            f"parallel.tensor={tensor} leaves of {world_size}: use {_near_divisors(world_size // tensor, context)} of them"
        )
    together = train.microbatch * ranks
    if train.batch_size % together:
        below = train.batch_size // together * together
        near = [size for size in (below, below + together) if size]
        raise UserError(
            f"train.batch_size={train.batch_size} is not a multiple of the {together} rows that {ranks} data-parallel "
            f"ranks of train.microbatch={train.microbatch} take at once: "
            f"use train.batch_size={_alternatives([str(size) for size in near])}{_microbatch_hint(train, ranks)}"
        )


def _microbatch_hint(train: TrainConfig, ranks: int) -> str:
    """The microbatches that would do for the batch as it is."""
    if train.batch_size % ranks:
        return ""
    return f", or train.microbatch={_near_divisors(train.batch_size // ranks, train.microbatch)}"


def _near_divisors(number: int, near: int) -> str:
    """The divisors of `number` that lie nearest `near`, at most six, as words."""
    divisors = [n for n in range(1, number + 1) if number % n == 0]
    nearest = sorted(sorted(divisors, key=lambda n: abs(n - near))[:6])
    return _alternatives([str(n) for n in nearest])


def _alternatives(names: list[str]) -> str:
    return names[0] if len(names) == 1 else ", ".join(names[:-1]) + " or " + names[-1]
