"""Refuses settings that cannot run, and says what would. `ssscale.config` has already checked the types."""

import operator
import unicodedata
from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from enum import Enum
from typing import Any

from ssscale.config.registry import IN_PLUGIN, MIXERS, OPTIMIZERS, POSITIONS
from ssscale.config.schema import Config, ModelConfig, StageConfig, TrainConfig
from ssscale.errors import UserError
from ssscale.model.flops import declared_weights, is_of_mixer
from ssscale.model.positions.base import Position
from ssscale.names import is_plain_path
from ssscale.train.microbatch import with_microbatch
from ssscale.train.stages import Plan, folder_of, stage_config
from ssscale.validate_parallel import alternatives, check_parallel, check_world, near_divisors
from ssscale.validate_schedule import check_stage, shown


def validate(config: Config, world_size: int | None = None, gpu: bool = False) -> None:
    """Raises UserError, with one sentence, for the first setting of `config` that cannot run.

    world_size: number of processes; None leaves out the checks that depend on it.
    gpu: whether the run uses GPUs, which decides what `train.precision=auto` means.
    """
    _check_settings(config, gpu)
    if world_size is not None and world_size >= 2**31:
        raise UserError("more than 2^31 processes: no machine has so many")
    _check_evaluation(config.train)
    names = [stage.name for stage in config.train.stages]
    if not names:
        raise UserError("train.stages is empty: a run needs at least one stage")
    for index, stage in enumerate(config.train.stages):
        if stage.name in names[:index]:
            raise UserError(f"train.stages.{index}.name: two stages are called {stage.name!r}; give each its own name")
        own = stage_config(config, index)
        check_stage(stage, f"train.stages.{index}", index, own.tokens_per_step)
        _check_change(config, own, stage, index)
        check_parallel(own, gpu)
        if gpu and own.train.deterministic:
            _check_deterministic(own.model)
        if world_size is not None:
            for rows in [own.train.batch_size, *(warmup.batch_size for warmup in stage.batch_warmup)]:
                check_world(replace(own, train=replace(own.train, batch_size=rows)), world_size)
                with_microbatch(own, rows, world_size)
    used = [name for model in (config.model, *Plan(config).models) for name in model.mixers]
    _check_unused(config, used, type(config.model.mixer)())


def validate_checkpoint(config: Config, saved: Config) -> None:
    """Raises UserError, like `validate`, for the configuration of a checkpoint, changed from how it was `saved`.

    Its stages are not checked: they were when it was trained, and here they would begin from the values of a later one.
    Options that only mixers of other stages use are refused if they are changed.
    """
    _check_settings(config)
    check_parallel(config, gpu=False)
    _check_unused(config, config.model.mixers, saved.model.mixer)


def _check_settings(config: Config, gpu: bool = False) -> None:
    """Checks what holds whatever the stages are."""
    _check_leaves(config, "")
    if not is_plain_path(config.name):
        raise UserError(f"name={config.name} must be like run or sweep/run, without ..: run_dir= takes any folder")
    _check_numbers(config)
    _check_model(config.model)
    check_mixers(config.model)
    _check_position(config.model, gpu)
    _check_optimizer(config)


def _check_evaluation(train: TrainConfig) -> None:
    if bool(train.tasks) != bool(train.task_every):
        raise UserError(
            f"train.tasks={train.tasks} and train.task_every={train.task_every} go together: name tasks and how often they "
            "are evaluated, or neither"
        )
    if train.keep_best and not (train.eval_every and train.save_every):
        raise UserError(
            f"train.keep_best=true has no effect with train.eval_every={train.eval_every} and "
            f"train.save_every={train.save_every}: it needs checkpoints of steps that are evaluated; let neither be 0"
        )


def _check_deterministic(model: ModelConfig) -> None:
    """Raises UserError for options with which results differ from run to run on a GPU."""
    place = model.place
    found = [(f"model.position.method={place.name}", place.varies)] if place.varies is not None else []
    found += [(f"model.mixer.{m.name}.{m.varies[0]}", m.varies[1]) for m in model.used.values() if m.varies is not None]
    for option, reason in found:
        raise UserError(f"train.deterministic does not go with {option}: {reason}")


Bound = tuple[str, Callable[[Any, Any], bool], float]

AT_LEAST_1: Bound = ("at least 1", operator.ge, 1)
AT_LEAST_0: Bound = ("0 or more", operator.ge, 0)
ABOVE_0: Bound = ("greater than 0", operator.gt, 0)
BELOW_0: Bound = ("less than 0", operator.lt, 0)
BELOW_1: Bound = ("less than 1", operator.lt, 1)
# Larger values cannot be intended, and they overflow counters of 64 or 32 bits.
SIZE: Bound = ("less than 2^31", operator.lt, 2**31)
SEED: Bound = ("less than 2^43", operator.lt, 2**43)  # torch's seeds end at 2^63, and each weight has one of a million
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
    "optimizer.weight_decay": (AT_LEAST_0,),
    "optimizer.vector_lr_multiplier": (AT_LEAST_0,),
    "optimizer.clip": (AT_LEAST_0,),
    "train.batch_size": (AT_LEAST_1, SIZE),
    "train.microbatch": (AT_LEAST_1, SIZE),
    "train.max_steps": (AT_LEAST_0,),
    "train.seed": (AT_LEAST_0, SEED),
    "train.z_loss": (AT_LEAST_0,),
    "train.log_every": (AT_LEAST_1,),
    "train.eval_every": (AT_LEAST_0,),
    "train.eval_rows": (AT_LEAST_1,),
    "train.task_every": (AT_LEAST_0,),
    "train.task_limit": (AT_LEAST_1,),
    "train.save_every": (AT_LEAST_0,),
    "train.observe_every": (AT_LEAST_0,),
    "train.profile": (AT_LEAST_1,),
    "train.profile_ranks": (AT_LEAST_1,),
    "train.max_skipped": (AT_LEAST_1,),
    "train.spike_z": (AT_LEAST_0,),
    "train.watchdog": (AT_LEAST_0, A_YEAR),
    "train.guard_every": (AT_LEAST_0,),
    "train.straggler_every": (AT_LEAST_0,),
    "train.keep": (AT_LEAST_1, SIZE),
    "train.keep_every": (AT_LEAST_0,),
    "parallel.tensor": (AT_LEAST_1, SIZE),
    "parallel.ulysses": (AT_LEAST_1, SIZE),
    "parallel.ring": (AT_LEAST_1, SIZE),
    "parallel.shard_within": (AT_LEAST_1, SIZE),
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
    "length": (("at least 2", operator.ge, 2), SIZE),
    "batch_size": (AT_LEAST_1, SIZE),
    "microbatch": (AT_LEAST_1, SIZE),
}

WARMUP_BOUNDS: dict[str, tuple[Bound, ...]] = {"batch_size": (AT_LEAST_1, SIZE), "tokens": (AT_LEAST_1,)}


def _check_leaves(value: Any, key: str) -> None:
    """Checks what holds for every key: integers fit into 64 bits, and strings can be printed, saved and used as paths."""
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
            raise UserError(f"{key} has a character that cannot be used in a file name: {value!r}")
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
                f"train.stages.{index}.mix is empty: name sources, or use null for all in proportion to their sizes"
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
            if isinstance(number, Enum):  # a word in place of a number
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


def _check_names(model: ModelConfig) -> None:
    for name in model.mixers:
        if name not in MIXERS:
            raise UserError(
                f"model.mixers={_listed(model.mixers)}: there is no mixer {name}; use {alternatives(list(MIXERS))}, "
                f"{IN_PLUGIN}"
            )
    method = model.position.method
    if method not in POSITIONS:
        raise UserError(f"model.position.method must be one of {', '.join(POSITIONS)}, not {method!r}, {IN_PLUGIN}")


def check_mixers(model: ModelConfig) -> None:
    """Raises UserError for a pattern that is empty, too long or names an unknown mixer, and for incompatible options."""
    if not model.mixers:
        raise UserError(f"model.mixers is empty: name one of {', '.join(MIXERS)} for every layer, or a pattern of them")
    if len(model.mixers) > model.num_layers:
        raise UserError(
            f"model.mixers is a pattern of {len(model.mixers)} layers, and the model has model.num_layers={model.num_layers}"
        )
    _check_names(model)
    for mixer in model.used.values():
        mixer.check(model)


def _check_unused(config: Config, used: list[str], before: Any) -> None:
    """Raises UserError for options of mixers that are not `used` and were changed, as the user expects them to have an effect.

    before: `model.mixer` without changes.
    """
    for entry in fields(config.model.mixer):
        options, unchanged = (getattr(section, entry.name) for section in (config.model.mixer, before))
        if entry.name in used or options == unchanged:
            continue
        changed = next(f.name for f in fields(options) if getattr(options, f.name) != getattr(unchanged, f.name))
        raise UserError(
            f"model.mixer.{entry.name}.{changed}={shown(getattr(options, changed))} has no effect: "
            f"model.mixers={_listed(config.model.mixers)} has no {entry.name}"
        )


def _listed(names: list[str]) -> str:
    return f"[{', '.join(names)}]"


def _check_position(model: ModelConfig, gpu: bool = False) -> None:
    position, mixers = model.position, list(model.used.values())
    method = model.place
    takers = [mixer for mixer in mixers if method.name in mixer.positions]
    for mixer in mixers:
        # Refuse a mixer that supports positions but not this method: it would train without any. A mixer that supports
        # none is fine if another mixer of the model uses the method.
        if method.name not in mixer.positions and (mixer.takes_positions or not takers):
            reason = f"; {mixer.positions_reason}" if mixer.positions_reason else ""
            raise UserError(
                f"model.position.method={method.name} does not go with model.mixers={_listed(model.mixers)}: "
                f"use {alternatives(sorted(mixer.positions))}{reason}"
            )
    if position.window is not None and all(mixer.no_window is not None for mixer in mixers):
        raise UserError(
            f"model.position.window={position.window} does not go with model.mixers={_listed(model.mixers)}, which "
            f"{mixers[0].no_window}: set model.position.window=null"
        )
    method.check(model, gpu)
    for entry in fields(position):
        options = getattr(position, entry.name)
        if isinstance(options, Position) and entry.name != method.name and options != type(options)():
            changed = next(f.name for f in fields(options) if getattr(options, f.name) != f.default)
            raise UserError(
                f"model.position.{entry.name}.{changed} needs model.position.method={entry.name}, not {method.name}"
            )


def _check_optimizer(config: Config) -> None:
    given = config.optimizer
    if given.name not in OPTIMIZERS:
        raise UserError(f"optimizer.name must be one of {', '.join(OPTIMIZERS)}, not {given.name!r}, {IN_PLUGIN}")
    given.chosen.check(config)
    for name in OPTIMIZERS:
        options = getattr(given, name)
        if name != given.name and options != type(options)():
            changed = next(f.name for f in fields(options) if getattr(options, f.name) != f.default)
            raise UserError(f"optimizer.{name}.{changed} needs optimizer.name={name}, not {given.name}")


def _check_change(config: Config, own: Config, stage: StageConfig, index: int) -> None:
    """Checks the changes that a stage makes to the stage before it."""
    before = stage_config(config, index - 1) if index else config
    key = f"train.stages.{index}"
    if stage.model is not None:
        _check_model_change(stage, before.model, own.model, f"{key}.model")
    same = folder_of(own.data.path) == folder_of(before.data.path)
    if same and stage.length not in (None, before.data.length):
        raise UserError(
            f"{key}.length={stage.length} needs data packed to this length: set {key}.data_path, as {own.data.path} has "
            f"rows of {before.data.length} tokens"
        )
    _check_model(own.model)
    check_mixers(own.model)
    _check_position(own.model)
    if index:
        _check_kept_weights(before, own, key)


def _check_kept_weights(before: Config, own: Config, key: str) -> None:
    """Requires that a stage keeps the declared weights of the stage before. Only mixers may add some."""
    old, new = (declared_weights(config.model, config.data.length) for config in (before, own))
    for name, weight in old.items():
        if name not in new or new[name].shape != weight.shape:
            change = "drop" if name not in new else f"change {list(weight.shape)} to {list(new[name].shape)} in"
            raise UserError(f"{key} would {change} {name}, which the stage before trains: a stage keeps all weights")
    for name in new:
        if name not in old and not is_of_mixer(name):
            raise UserError(f"{key} would add {name}: only mixers can get new weights in a stage")


def _check_model_change(stage: StageConfig, before: ModelConfig, after: ModelConfig, key: str) -> None:
    """Requires that each layer keeps its mixer or switches to one that can begin from it (`Mixer.begins_from`)."""
    for old, new in zip(before.layer_mixers, after.layer_mixers, strict=True):
        if old.name != new.name and new.begins_from != old.name:
            begins = f"can only begin from {new.begins_from}" if new.begins_from else "cannot begin from another mixer"
            raise UserError(f"{key}.mixers={_listed(after.mixers)}: {new.name} {begins}, not from {old.name}")
