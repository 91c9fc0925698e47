"""The schedules: constant, cosine, WSD, Power, and a decay that continues the stage before."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from ssscale.config.choices import DecayShape
from ssscale.config.registry import SCHEDULES
from ssscale.train.schedules.base import Schedule, Stretch

if TYPE_CHECKING:
    from ssscale.config.schema import ScheduleConfig


@SCHEDULES.register("constant")
class Constant(Schedule):
    reads = ()

    def rate(self, config: ScheduleConfig, at: Stretch) -> float:
        return config.lr


@SCHEDULES.register("cosine")
class Cosine(Schedule):
    """η = η_max · (f + (1−f)·(1 + cos πx)/2), x from 0 after the warmup to 1 at the end of the stage   (arXiv:1608.03983)."""

    reads = ("floor",)

    def rate(self, config: ScheduleConfig, at: Stretch) -> float:
        rest = at.length - config.warmup_tokens
        return config.lr * cosine_factor((at.into - config.warmup_tokens) / rest if rest else 0.0, config.floor)


@SCHEDULES.register("wsd")
class WSD(Schedule):
    """η_max, multiplied by `decay_factor` over the last `decay_tokens`   (MiniCPM, arXiv:2404.06395)."""

    decays = True
    reads = ("decay_shape", "floor")

    def rate(self, config: ScheduleConfig, at: Stretch) -> float:
        return _decayed(config.lr, config, at)


@SCHEDULES.register("power")
class Power(Schedule):
    """η(n) = min(η_max, β·a·n^b)   (arXiv:2408.13359)

    n: tokens of the run; β: rows per step. Over the last `decay_tokens`, η keeps its value at their beginning and is
    multiplied by `decay_factor`.
    """

    decays = True
    reads = ("decay_shape", "floor", "power_a", "power_b")

    def rate(self, config: ScheduleConfig, at: Stretch) -> float:
        held = min(at.into, at.length - config.decay_tokens)
        lr = power_learning_rate(at.start + held, at.rows, config.lr, config.power_a, config.power_b)
        return _decayed(lr, config, at)


@SCHEDULES.register("decay")
class Decay(Schedule):
    """The last learning rate of the stage before, multiplied by `decay_factor` over the whole stage."""

    follows = True
    reads = ("decay_shape", "floor")

    def rate(self, config: ScheduleConfig, at: Stretch) -> float:
        assert at.before is not None, "validate() refuses a first stage that decays"
        return at.before * decay_factor(config.decay_shape, at.into / at.length, config.floor)


def _decayed(lr: float, config: ScheduleConfig, at: Stretch) -> float:
    decay_start = at.length - config.decay_tokens
    if at.into <= decay_start:
        return lr
    return lr * decay_factor(config.decay_shape, (at.into - decay_start) / config.decay_tokens, config.floor)


def power_learning_rate(tokens: int, batch_size: int, cap: float, a: float, b: float) -> float:
    """Returns η(n) = min(cap, β·a·n^b) for n tokens of the run and β rows per step   (arXiv:2408.13359)."""
    return cap if tokens <= 0 else min(cap, batch_size * a * float(tokens) ** b)


def cosine_factor(x: float, floor: float) -> float:
    """Returns f + (1−f)·(1 + cos πx)/2 with f = floor: from 1 at x = 0 to f at x = 1."""
    return floor + (1 - floor) * (1 + math.cos(math.pi * x)) / 2


def decay_factor(shape: DecayShape, x: float, floor: float) -> float:
    """Returns a factor that falls from 1 at x = 0 to exactly f = floor at x = 1, for WSD, Power and `Decay`.

    exponential: e/(e−1)·(1−f)·exp(−x) + (f·e−1)/(e−1)
    linear:      1 − (1−f)·x
    sqrt:        1 − (1−f)·√x   (1−sqrt, arXiv:2405.18392)
    """
    # The ends are exact, because rounding would give 1e-17 instead of a floor of 0.
    if x <= 0:
        return 1.0
    if x >= 1:
        return floor
    if shape is DecayShape.exponential:
        return math.e / (math.e - 1) * (1 - floor) * math.exp(-x) + (floor * math.e - 1) / (math.e - 1)
    return 1 - (1 - floor) * (x if shape is DecayShape.linear else math.sqrt(x))
