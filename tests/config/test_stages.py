"""The plan of a run: steps, tokens and rows of every stage."""

import math
from dataclasses import replace

import pytest

from ssscale.config import load_config
from ssscale.config.schema import BatchWarmup, Config, DataConfig, ModelChanges, StageConfig, TrainConfig
from ssscale.errors import UserError
from ssscale.train.stages import Plan, stage_config
from ssscale.validate import validate

STICKS = ModelChanges({"mixers": ["stickbreaking"]})
BASE = ModelChanges({"position": {"rope": {"base": 5e5}}})


def run(*stages: StageConfig, batch: int = 4, max_steps: int | None = None) -> Config:
    data = DataConfig(path="a", length=10)
    return Config(
        data=data, train=TrainConfig(batch_size=batch, microbatch=1, stages=list(stages), max_steps=max_steps)
    )


def test_a_step_belongs_to_the_stage_in_which_it_ends() -> None:
    plan = Plan(run(StageConfig("a", 100), StageConfig("b", 50, mix={"x": 1.0})))
    assert [(p.stage, p.first_step, p.num_steps, p.first_sample) for p in plan.parts] == [(0, 0, 2, 0), (1, 2, 2, 8)]
    assert plan.total_steps == 4
    assert plan.mixes("a") == [(0, None), (8, {"x": 1.0})]
    assert [plan.tokens(step) for step in (0, 1, 3, 4, 9)] == [0, 40, 120, 160, 160]
    assert Plan(run(StageConfig("a", 100), max_steps=2)).total_steps == 2


def test_batches_grow_and_data_folders_go_on_where_they_were_left() -> None:
    warmup = [BatchWarmup(1, 20), BatchWarmup(2, 60)]
    stages = [
        StageConfig("a", 200, batch_warmup=warmup),
        StageConfig("b", 80, data_path="b", length=20, batch_size=2),
        StageConfig("c", 90, data_path="a", length=10),
    ]
    config = run(*stages)
    validate(config, world_size=1)
    plan = Plan(config)
    sizes = [(p.stage, p.batch_size, p.length, p.num_steps, p.first_sample) for p in plan.parts]
    assert sizes == [(0, 1, 10, 2, 0), (0, 2, 10, 3, 2), (0, 4, 10, 3, 8), (1, 2, 20, 2, 0), (2, 2, 10, 5, 20)]
    assert plan.total_steps == 15
    assert plan.mixes("a") == [(0, None), (20, None)]
    assert [plan.next_sample(step) for step in (0, 2, 3, 7, 8, 10, 14, 15)] == [0, 2, 4, 16, 0, 20, 28, 30]
    skipped = [(6, 5), (9, 3)]  # five rows of a, three of b
    assert [plan.next_sample(step, skipped) for step in (7, 9, 10)] == [21, 5, 25]
    assert plan.mixes("a", skipped) == [(0, None), (25, None)]
    assert plan.mixes("b", skipped) == [(0, None)]


@pytest.mark.parametrize(
    ("stages", "sentence"),
    [
        (
            [StageConfig("a", 100, batch_warmup=[BatchWarmup(2, 40), BatchWarmup(1, 70)])],
            r"train.stages.0.batch_warmup takes 10 tokens more than stage 'a' trains",
        ),
        (
            [StageConfig("a", 100), StageConfig("b", 80, batch_size=8)],
            r"do not add up: stage 'b' changes the size of a step.* of 40 tokens: use train.stages.0.tokens=80 or 120",
        ),
        (
            [StageConfig("a", 100, batch_warmup=[BatchWarmup(2, 50)])],
            r"50 tokens are not a whole number.* use 40 or 60",
        ),
        ([StageConfig("a", 100, length=20)], r"stages.0.length=20 needs data packed to this length"),
        (
            [StageConfig("a", 100, model=ModelChanges({"mixers": ["stickbreaking"]}))],
            r"stages.0.model.mixers=.stickbreaking.: .* not from softmax",
        ),
        ([StageConfig("a", 100), StageConfig("b", 100, batch_size=3, microbatch=2)], r"train.batch_size=3 is not"),
    ],
)
def test_stages_that_cannot_run_are_one_sentence(stages: list[StageConfig], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        validate(run(*stages), world_size=1)


def test_the_switch_of_the_ssmax_study() -> None:
    config = load_config(["config=162m_ssmax_during"])
    validate(config, world_size=8, gpu=True)
    plan = Plan(config)
    assert [(part.num_steps, part.tokens_per_step) for part in plan.parts] == [(175_000, 2**21), (25_000, 2**21)]
    before, after = plan.models
    assert (before.mixers, after.mixers) == (["softmax"], ["ssmax"])
    assert after.mixer.ssmax.scale == pytest.approx(1024 / sum(math.log(n) for n in range(1, 1025)))
    assert after.mixer.ssmax.scale == pytest.approx(0.168, abs=5e-4)


def test_changes_hold_from_their_stage_on() -> None:
    config = run(
        StageConfig("a", 40),
        StageConfig("b", 40, model=BASE),
        StageConfig("c", 40),
    )
    assert [stage_config(config, i).model.position.rope.base for i in range(3)] == [1e4, 5e5, 5e5]
    assert stage_config(config, 0) == replace(config)
