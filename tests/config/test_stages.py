"""The plan of a run: steps, tokens and rows of every stage."""

import json
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from ssscale.config import change, load_config
from ssscale.config.schema import BatchWarmup, Config, DataConfig, ModelChanges, StageConfig, TrainConfig
from ssscale.data.order import Order
from ssscale.errors import UserError
from ssscale.train.finetune import finetuning_config
from ssscale.train.stages import Plan, Returns, read_returns, restarted_weights, stage_config
from ssscale.validate import validate, validate_checkpoint

STICKS = ModelChanges({"mixers": ["stickbreaking"]})
BASE = ModelChanges({"position": {"rope": {"base": 5e5}}})


def run(*stages: StageConfig, batch: int = 4, max_steps: int | None = None) -> Config:
    data = DataConfig(path="a", length=10)
    return Config(
        data=data, train=TrainConfig(batch_size=batch, microbatch=1, stages=list(stages), max_steps=max_steps)
    )


def test_a_step_belongs_to_the_stage_in_which_it_ends() -> None:
    plan = Plan(run(StageConfig("a", 100), StageConfig("b", 50, mix={"x": 1.0})))
    assert [(p.stage, p.first_step, p.num_steps) for p in plan.parts] == [(0, 0, 2), (1, 2, 2)]
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
    sizes = [(p.stage, p.batch_size, p.length, p.num_steps, plan.next_sample(p.first_step)) for p in plan.parts]
    assert sizes == [(0, 1, 10, 2, 0), (0, 2, 10, 3, 2), (0, 4, 10, 3, 8), (1, 2, 20, 2, 0), (2, 2, 10, 5, 20)]
    assert plan.total_steps == 15
    assert plan.mixes("a") == [(0, None), (20, None)]
    assert [plan.next_sample(step) for step in (0, 2, 3, 7, 8, 10, 14, 15)] == [0, 2, 4, 16, 0, 20, 28, 30]
    skipped = read_returns([[6, 5], [9, 3]])  # five rows of a, three of b
    assert [plan.next_sample(step, skipped) for step in (7, 9, 10)] == [21, 5, 25]
    assert plan.mixes("a", skipped) == [(0, None), (25, None)]
    assert plan.mixes("b", skipped) == [(0, None)]


@pytest.mark.parametrize(
    ("first", "again"), [("a", "a/"), ("a", "./a"), ("a", f"{Path.cwd()}/b/../a"), ("s3://bucket/a", "s3://bucket/a/")]
)
def test_a_folder_spelled_in_another_way_goes_on_where_it_was_left(first: str, again: str) -> None:
    stages = [StageConfig("a", 80), StageConfig("b", 80, data_path="b"), StageConfig("c", 80, data_path=again)]
    config = run(*stages)
    plan = Plan(replace(config, data=replace(config.data, path=first)))
    assert [plan.next_sample(step) for step in (1, 2, 4, 5)] == [4, 0, 8, 12]
    assert plan.mixes(first) == plan.mixes(again) == [(0, None), (8, None)]


SHARDS = {"x": [900], "y": [600]}
VARIED = [  # its steps read 1 1 3 3 | 3 3 3 | 2 2 2 | 3 3 3 rows of a a a b, and the mix of a changes each time
    StageConfig("a", 80, batch_warmup=[BatchWarmup(1, 20)], mix={"x": 0.7, "y": 0.3}),
    StageConfig("b", 90, mix={"x": 0.2, "y": 0.8}),
    StageConfig("c", 120, data_path="b", length=20, batch_size=2),
    StageConfig("d", 90, data_path="a", length=10, batch_size=3, mix={"y": 1.0}),
]


def read(plan: Plan, first: int, last: int, skipped: Returns) -> Iterator[tuple[str, int, int]]:
    """(data folder, source, row) of all rows of some steps."""
    for step in range(first, last):
        part = plan.at(step)
        path = plan.configs[part.stage].data.path
        order, sample = Order(SHARDS, plan.mixes(path, skipped), seed=1), plan.next_sample(step, skipped)
        yield from (
            (path, found.source, found.row) for found in map(order.__getitem__, range(sample, sample + part.batch_size))
        )


@pytest.mark.parametrize(
    "returns",
    [
        [],
        [(3, 1)],  # the batch has grown
        [(4, 2)],  # from the end of a stage
        [(6, 3)],  # the mix has changed
        [(6, 4)],  # to the beginning of a stage
        [(9, 5)],  # the folder has changed
        [(12, 2)],  # from the third stage of a folder to the first
        [(12, 8)],
        [(6, 3), (6, 3), (9, 3)],  # to the same checkpoint
        [(6, 3), (7, 4), (9, 7), (12, 8)],
        [(9, 6), (9, 6), (9, 2), (5, 2), (12, 7)],  # the checkpoint of step 6 is lost, and that of step 2 is taken
    ],
)
def test_no_row_is_read_twice_or_left_unread_when_a_run_goes_back(returns: list[tuple[int, int]]) -> None:
    """Each source of each folder is read in its own order, whatever folders, mixes and batches the run goes back over."""
    plan = Plan(run(*VARIED, batch=3))
    assert [plan.at(step).batch_size for step in range(13)] == [1, 1, 3, 3, 3, 3, 3, 2, 2, 2, 3, 3, 3]
    rows: list[tuple[str, int, int]] = []
    step = 0
    skipped: Returns = ()
    for before, to in returns:
        rows += read(plan, step, before, skipped)
        skipped, step = plan.leave_out(skipped, before, to), to
        assert read_returns(json.loads(json.dumps(skipped))) == skipped
        assert skipped[-1][0] == to
    rows += read(plan, step, plan.total_steps, skipped)
    for path in ("a", "b"):
        for source, name in enumerate(SHARDS):
            alone = Order(SHARDS, [(0, {name: 1.0})], seed=1)
            found = [row for at, of, row in rows if (at, of) == (path, source)]
            assert found == [alone[k].row for k in range(len(found))]
            assert found


def test_what_was_left_out_in_one_stage_is_a_pair_as_before() -> None:
    """States of older versions hold a pair each time: rows of the stage that trains after the checkpoint."""
    plan = Plan(run(*VARIED, batch=3))
    assert plan.leave_out((), 3, 1) == ((1, 4),)  # one step of one row, and one of three
    assert plan.leave_out(read_returns([[1, 4]]), 9, 5) == ((1, 4), (5, 6, 7, 4))
    assert plan.leave_out(read_returns([[5, 3]]), 9, 5) == ((5, 3), (5, 6, 7, 4))
    assert plan.leave_out(read_returns([[1, 4], [6, 3]]), 8, 2) == ((1, 4), (2, 6, 4, 12, 7, 2))
    assert plan.mixes("a", read_returns([[5, 100]])) == [(0, VARIED[0].mix), (8, VARIED[1].mix), (117, VARIED[3].mix)]
    assert plan.mixes("a", read_returns([[3, 100]])) == [(0, VARIED[0].mix), (108, VARIED[1].mix), (117, VARIED[3].mix)]


def ssmax(variant: str) -> ModelChanges:
    return ModelChanges({"mixers": ["ssmax"], "mixer": {"ssmax": {"variant": variant}}})


@pytest.mark.parametrize("saved", [3, [3], [[]], [[1]], [[1, 2, 3]], [[1, -2]], [[1, 0]], ["ab"], [[1, None]]])
def test_rows_left_out_that_no_run_has_written(saved: object) -> None:
    with pytest.raises((ValueError, TypeError)):
        read_returns(saved)


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
            [StageConfig("a", 100, batch_warmup=[BatchWarmup(1, 30)]), StageConfig("b", 80, batch_size=8)],
            r"ends within a step of 40 tokens: use train.stages.0.tokens=70 or 110",
        ),
        (
            [StageConfig("a", 100, batch_warmup=[BatchWarmup(2, 50)])],
            r"50 tokens are not a whole number.* use 40 or 60",
        ),
        ([StageConfig("a", 100, length=20)], r"stages.0.length=20 needs data packed to this length"),
        (
            [StageConfig("a", 100), StageConfig("b", 100, data_path="./a/", length=20)],
            r"stages.1.length=20 needs data packed to this length",
        ),
        (
            [StageConfig("a", 100, model=ModelChanges({"mixers": ["stickbreaking"]}))],
            r"stages.0.model.mixers=.stickbreaking.: .* not from softmax",
        ),
        ([StageConfig("a", 100), StageConfig("b", 100, batch_size=3, microbatch=2)], r"train.batch_size=3 is not"),
        (
            [StageConfig("a", 80), StageConfig("b", 80, model=ModelChanges({"position": {"method": "fire"}}))],
            r"stages.1 would add blocks.0.attention.position_weights\..*: only mixers can get new weights in a stage",
        ),
        (
            [StageConfig("a", 80, model=ssmax("bias")), StageConfig("b", 80, model=ssmax("learned"))],
            r"stages.1 would drop blocks.0.attention.weights.b, which the stage before trains: a stage keeps all weights",
        ),
        (
            [StageConfig("a", 80, model=ssmax("pn")), StageConfig("b", 80, data_path="b", length=20)],
            r"stages.1 would change \[10\] to \[20\] in shared.ssmax.pn, which the stage before trains",
        ),
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


def test_a_changed_scale_restarts_s_and_nothing_else_does() -> None:
    scale = ModelChanges({"mixer": {"ssmax": {"scale": 0.5}}})
    stages = [StageConfig("a", 40), StageConfig("b", 40, model=ssmax("bias")), StageConfig("c", 40, model=scale)]
    config = run(*stages, StageConfig("d", 40, model=BASE, data_path="d", length=20))
    steps = [stage_config(config, index) for index in range(4)]
    layers = range(config.model.num_layers)
    assert restarted_weights(steps[1], steps[2]) == {f"blocks.{layer}.attention.weights.s" for layer in layers}
    assert not restarted_weights(steps[0], steps[1])
    assert not restarted_weights(steps[2], steps[3])


def test_options_of_another_stage_are_refused_only_if_they_are_changed() -> None:
    """The options of softmax in the checkpoint of a stage that has replaced it, and the other way round."""
    config = run(StageConfig("a", 80), StageConfig("b", 80, model=ModelChanges({"mixers": ["ssmax"]})))
    config = change(config, ["model.mixer.softmax.backend=flash", "model.mixer.ssmax.variant=pn"])
    validate(config)
    for index, other in enumerate(["ssmax.scale=2.0", "softmax.backend=cudnn"]):
        saved = stage_config(config, index)
        validate_checkpoint(saved, saved)
        with pytest.raises(UserError, match=rf"model.mixer.{other.replace('.', '[.]')} has no effect"):
            validate_checkpoint(change(saved, [f"model.mixer.{other}"]), saved)
        validate(finetuning_config(saved, "a", "b", num_examples=8, epochs=2, lr=1e-3, batch=8, microbatch=8))
