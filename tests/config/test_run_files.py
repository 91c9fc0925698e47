"""The shipped run files against the papers' figures."""

import pytest

from ssscale.config import from_yaml, load_config, run_names, to_yaml
from ssscale.config.schema import Config
from ssscale.model.flops import count_parameters, flops_per_token
from ssscale.model.mixers.ssmax import Variant
from ssscale.model.positions.rope import RopeScaling
from ssscale.train.schedule import total_tokens
from ssscale.train.stages import Plan
from ssscale.validate import validate

PARAMETERS = {
    "162m_softmax": 162_148_608,
    "162m_sb": 162_148_608,
    "162m_ssmax_after": 162_148_752,
    "162m_ssmax_during": 162_148_608,
    "162m_ssmax": 162_148_752,
    "162m_ssmax_fixed": 162_148_608,
    "162m_ssmax_bias": 162_148_896,
    "162m_ssmax_pn": 162_149_920,
    "350m_sb": 367_526_912,
    "350m_sb_rem": 367_526_912,
    "350m_rope": 367_526_912,
    "350m_nope": 367_526_912,
    "350m_alibi": 367_526_912,
    "350m_fire": 367_526_912 + 24 * (2 + 32 + 32 + 32 * 32 + 32),
    "350m_rope_ntk": 367_526_912,
    "350m_rope_8k": 367_526_912,
    "350m_window512": 367_526_912,
    "350m_window1024": 367_526_912,
    "350m_window2048": 367_526_912,
    "1b_softmax": 1_208_083_968,
    "1b_ssmax": 1_208_083_968 + 40 * 24,
    "1b_sb": 1_208_083_968,
    "1b_sb_rem": 1_208_083_968,
    "3b_softmax": 3_513_473_280,
    "3b_ssmax": 3_513_473_280 + 40 * 36,
    "3b_sb": 3_513_473_280,
    "50m_softmax": 51_430_400,
    "50m_ssmax": 51_430_400 + 8 * 8,
    "50m_rope": 51_430_400,
    "50m_sb": 51_430_400,
    "50m_nope": 51_430_400,
    "50m_alibi": 51_430_400,
    "50m_window512": 51_430_400,
    "tiny_softmax": 734_080,
    "tiny_ssmax": 734_080 + 3 * 2,
    "tiny_sb": 734_080,
}

CONFIGS = {name: load_config([f"config={name}"]) for name in PARAMETERS}


def test_every_run_file_is_listed_here():
    # Those of later issues have their own tests; these must exist.
    assert set(PARAMETERS) <= set(run_names())


@pytest.mark.parametrize("name", run_names())
def test_run_file_loads_validates_and_round_trips(name):
    config = CONFIGS.get(name) or load_config([f"config={name}"])
    assert config.name == name
    validate(config)
    validate(config, world_size=2, gpu=False)
    validate(config, world_size=8 if not name.startswith("tiny") else 2, gpu=True)
    assert from_yaml(to_yaml(config)) == config


@pytest.mark.parametrize("name", PARAMETERS)
def test_parameter_count(name):
    config = CONFIGS[name]
    assert count_parameters(config.model, config.data.length) == PARAMETERS[name]


@pytest.mark.parametrize("name", PARAMETERS)
def test_core_and_position_are_what_the_name_says(name):
    model = CONFIGS[name].model
    variant = name.partition("_")[2]
    core = {"ssmax": "ssmax", "sb": "stickbreaking"}.get(variant.split("_")[0], "softmax")
    core = "softmax" if variant == "ssmax_during" else core  # as it begins
    methods = {"nope": "nope", "alibi": "alibi", "fire": "fire"}
    method = "nope" if core == "stickbreaking" else methods.get(variant, "rope")
    assert model.mixers == [core]
    assert model.position.method == method
    window = variant.removeprefix("window")
    assert model.position.window == (int(window) if window.isdecimal() else None)
    assert (model.position.rope.scaling is RopeScaling.dynamic_ntk) is (variant == "rope_ntk")
    assert model.position.rope.train_length == (2048 if variant == "rope_ntk" else None)
    assert model.mixer.stickbreaking.remainder is variant.endswith("rem")
    kinds = {"ssmax_fixed": Variant.fixed, "ssmax_bias": Variant.bias, "ssmax_pn": Variant.pn}
    assert model.mixer.ssmax.variant is kinds.get(variant, Variant.learned)
    assert model.mixer.ssmax.scale == 1.0


def check_plan(config: Config, length: int, batch: int, tokens: list[int], kinds: list[str]) -> None:
    assert (config.data.length, config.train.batch_size) == (length, batch)
    assert [stage.tokens for stage in config.train.stages] == tokens
    assert [stage.schedule.kind for stage in config.train.stages] == kinds
    assert (config.optimizer.adamw.betas, config.optimizer.weight_decay, config.optimizer.clip) == (
        (0.9, 0.95),
        0.1,
        1.0,
    )


@pytest.mark.parametrize("name", [n for n in PARAMETERS if n.startswith("162m_s") and not n.endswith("during")])
def test_ssmax_study(name):
    config = CONFIGS[name]
    steps = 25_000 if name.endswith("pn") else 200_000
    check_plan(config, 1024, 2048, [steps * 2_097_152], ["constant"])
    if name.endswith("after"):
        assert (config.init_from, config.train.max_steps) == ("runs/162m_softmax", 0)
        steps = 0
    schedule = config.train.stages[0].schedule
    assert (schedule.lr, schedule.warmup_tokens) == (6e-4, 1000 * 2_097_152)
    assert Plan(config).total_steps == steps
    assert config.data.one_document
    assert config.model.position.rope.base == 10_000


@pytest.mark.parametrize("name", [n for n in PARAMETERS if n.startswith("350m")])
def test_position_study(name):
    length, batch = (8192, 128) if name.endswith("8k") else (2048, 512)
    check_plan(CONFIGS[name], length, batch, [15_000_000_000], ["cosine"])
    assert not CONFIGS[name].data.one_document


@pytest.mark.parametrize("name", [n for n in PARAMETERS if n[:2] in ("1b", "3b")])
def test_two_stage_plan(name):
    config = CONFIGS[name]
    check_plan(config, 4096, 1024, [10**12, 250 * 10**9], ["power", "decay"])
    first, second = config.train.stages
    assert (first.schedule.lr, first.schedule.power_a, first.schedule.power_b) == (0.01, 4.0, -0.51)
    assert second.schedule.floor == 0.0
    assert first.mix is not None
    assert second.mix is not None
    assert set(second.mix) - set(first.mix) == {"high_quality"}
    model = config.model
    assert model.m_width == {"1b": 6, "3b": 9}[name[:2]]
    assert (model.logits_divisor, model.matrix_lr_divisor, model.matrix_init_divisor) == (
        model.m_width,
        model.m_width,
        model.m_width**0.5,
    )
    assert (model.init_std, model.depth_scaled_init) == (0.1, False)
    assert (model.width.embedding_multiplier, model.width.residual_multiplier) == (12, 0.22)
    assert model.width.attention_scale == 1 / model.head_size


@pytest.mark.parametrize("name", [n for n in PARAMETERS if n.startswith("tiny")])
def test_tiny_runs_have_a_stable_stage_and_a_decay(name):
    config = CONFIGS[name]
    assert (config.data.path, config.data.length, config.model.vocab_size) == ("data/stdlib", 256, 1024)
    assert [s.name for s in config.train.stages] == ["stable", "decay"]
    assert config.train.stages[1].schedule.kind == "decay"
    assert total_tokens(config.train.stages) % config.tokens_per_step == 0


def test_flops_of_1b():
    config = CONFIGS["1b_softmax"]
    assert flops_per_token(config.model, 4096, causal_half=False) == 6 * 1_208_083_968 + 12 * 40 * 1536 * 4096
    assert flops_per_token(config.model, 4096, causal_half=True) == 6 * 1_208_083_968 + 6 * 40 * 1536 * 4096


def test_flops_leave_out_an_untied_input_embedding():
    model = CONFIGS["162m_softmax"].model
    n = 162_148_608 - 50_257 * 768
    assert flops_per_token(model, 1024, causal_half=False) == 6 * n + 12 * 12 * 768 * 1024
    assert flops_per_token(model, 1024, causal_half=True) == 6 * n + 6 * 12 * 768 * 1024
