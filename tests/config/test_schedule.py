"""Learning rates against formulas written out again here, step by step where that is the clearer way."""

import math

import pytest

from ssscale.config import load_config
from ssscale.config.choices import DecayShape
from ssscale.config.schema import ScheduleConfig, StageConfig
from ssscale.train.schedule import learning_rate, stage_at
from ssscale.train.schedules.shapes import decay_factor, power_learning_rate
from ssscale.train.stages import Plan

ALL_SHAPES = list(DecayShape)


def stage(tokens, kind, **schedule):
    return StageConfig(name=f"{kind}{tokens}", tokens=tokens, schedule=ScheduleConfig(kind=kind, **schedule))


def test_warmup_reaches_the_peak_with_its_last_step():
    stages = [stage(1000, "constant", lr=0.5, warmup_tokens=40)]
    rates = [learning_rate(stages, 1, tokens) for tokens in range(10, 101, 10)]  # steps of 10 tokens
    assert rates == [0.125, 0.25, 0.375] + [0.5] * 7


def test_cosine():
    stages = [stage(1000, "cosine", lr=2.0, warmup_tokens=200, floor=0.1)]
    assert learning_rate(stages, 1, 100) == 1.0
    assert learning_rate(stages, 1, 200) == 2.0
    assert learning_rate(stages, 1, 600) == pytest.approx(2.0 * 0.55)
    assert learning_rate(stages, 1, 1000) == pytest.approx(0.2)
    quarter = 0.1 + 0.9 * math.cos(math.pi / 8) ** 2  # the half-angle form
    assert learning_rate(stages, 1, 400) == pytest.approx(2.0 * quarter)


@pytest.mark.parametrize("shape", ALL_SHAPES)
@pytest.mark.parametrize("floor", [0.0, 0.1, 0.5])
def test_decay_runs_from_one_to_exactly_its_floor(shape, floor):
    values = [decay_factor(shape, i / 1000, floor) for i in range(1001)]
    assert values[0] == 1.0
    assert values[-1] == floor
    assert values == sorted(values, reverse=True)
    assert values[1] == pytest.approx(1.0, abs=0.04)  # no jump at either end
    assert values[-2] == pytest.approx(floor, abs=0.002)


@pytest.mark.parametrize("floor", [0.0, 0.1])
@pytest.mark.parametrize("x", [0.1, 0.5, 0.9])
def test_decay_shapes(x, floor):
    # exp(−x), shifted and stretched so that it meets 1 and the floor
    stretched = floor + (1 - floor) * (math.exp(-x) - math.exp(-1)) / (1 - math.exp(-1))
    assert decay_factor(DecayShape.exponential, x, floor) == pytest.approx(stretched, rel=1e-12)
    assert decay_factor(DecayShape.linear, x, floor) == pytest.approx(floor * x + 1 - x)
    assert decay_factor(DecayShape.sqrt, x, floor) == pytest.approx(floor + (1 - floor) * (1 - x**0.5))


@pytest.mark.parametrize("shape", ALL_SHAPES)
def test_wsd_is_stable_until_its_last_tokens(shape):
    stages = [stage(1000, "wsd", lr=3.0, warmup_tokens=100, decay_tokens=200, decay_shape=shape, floor=0.1)]
    assert [learning_rate(stages, 1, t) for t in (50, 100, 500, 800)] == [1.5, 3.0, 3.0, 3.0]
    assert learning_rate(stages, 1, 900) == pytest.approx(3.0 * decay_factor(shape, 0.5, 0.1))
    assert learning_rate(stages, 1, 1000) == pytest.approx(0.3, rel=1e-15)


def test_power_formula_and_where_its_cap_ends():
    for n in (10**9, 10**10, 10**11, 2 * 10**11, 10**12):
        expected = min(0.01, 1024 * 4 * math.exp(-0.51 * math.log(n)))
        assert power_learning_rate(n, 1024, 0.01, 4.0, -0.51) == pytest.approx(expected, rel=1e-12)
    assert power_learning_rate(100 * 10**9, 1024, 0.01, 4.0, -0.51) == 0.01
    assert power_learning_rate(102 * 10**9, 1024, 0.01, 4.0, -0.51) < 0.01


def test_power_warmup_is_linear_to_the_power_of_its_end():
    # The warmup ends beyond the cap here, so that η(N_w) is not the cap.
    stages = [stage(10**6, "power", lr=1.0, warmup_tokens=10**4, power_a=4.0, power_b=-0.5)]
    end = 4.0 / 100
    assert learning_rate(stages, 1, 5000) == pytest.approx(end / 2)
    assert learning_rate(stages, 1, 10**4) == pytest.approx(end)
    assert learning_rate(stages, 1, 40_000) == pytest.approx(4.0 / 200)
    assert learning_rate(stages, 2, 40_000) == pytest.approx(8.0 / 200)  # batch size multiplies


def test_power_decay_phase_multiplies_its_first_learning_rate():
    stages = [stage(1_000_000, "power", lr=1.0, decay_tokens=360_000, power_b=-0.5, decay_shape=DecayShape.linear)]
    held = 4.0 / 800
    assert learning_rate(stages, 1, 640_000) == pytest.approx(held)
    assert learning_rate(stages, 1, 820_000) == pytest.approx(held / 2)
    assert learning_rate(stages, 1, 1_000_000) == 0.0


def test_power_counts_tokens_over_the_whole_run():
    parts = [stage(400, "power", lr=9.0, power_b=-0.5), stage(600, "power", lr=9.0, power_b=-0.5)]
    whole = [stage(1000, "power", lr=9.0, power_b=-0.5)]
    for tokens in (1, 399, 400, 401, 900):
        assert learning_rate(parts, 1, tokens) == learning_rate(whole, 1, tokens)


@pytest.mark.parametrize("shape", ALL_SHAPES)
def test_decay_stage_goes_on_where_the_stage_before_ended(shape):
    stages = [stage(400, "power", lr=9.0, power_b=-0.5), stage(100, "decay", decay_shape=shape, floor=0.25)]
    end = 4.0 / 20
    assert learning_rate(stages, 1, 400) == pytest.approx(end)
    assert learning_rate(stages, 1, 450) == pytest.approx(end * decay_factor(shape, 0.5, 0.25))
    assert learning_rate(stages, 1, 500) == pytest.approx(end / 4, rel=1e-15)
    assert learning_rate(stages, 1, 501) == learning_rate(stages, 1, 500)


def test_a_step_belongs_to_the_stage_in_which_it_ends():
    stages = [stage(100, "constant"), stage(50, "decay")]
    assert [stage_at(stages, t) for t in (1, 100, 101, 150, 160)] == [(0, 1), (0, 100), (1, 1), (1, 50), (1, 50)]


def test_the_two_stage_plan_of_3b():
    config = load_config(["config=3b_sb"])
    rate = lambda tokens: learning_rate(config.train.stages, 1024, int(tokens))  # noqa: E731
    assert rate(5e9) == pytest.approx(0.005)
    assert rate(1e10) == rate(1e11) == 0.01
    assert rate(1.02e11) < 0.01
    assert rate(1e12) == pytest.approx(4096 * 1e12**-0.51)
    assert rate(1e12) == pytest.approx(3.107e-3, rel=1e-3)
    assert rate(1.125e12) == pytest.approx(rate(1e12) * (math.exp(0.5) - 1) / (math.e - 1))
    steps = Plan(config).total_steps
    assert learning_rate(config.train.stages, 1024, steps * config.tokens_per_step) == 0.0
    assert learning_rate(config.train.stages, 1024, (steps - 1) * config.tokens_per_step) > 0.0
